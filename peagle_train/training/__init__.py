"""Training a head from stored states.

stage.py       the stage: what to build, what to resume, what to leave behind   (start here)
loop.py        steps, and what happens between them
validation.py  held-out acceptance, and the best head
data.py        which rows a step trains on: a pure function of its number
module.py      head and target output together: a batch in, sums out
launch.py      what the launcher was asked for, and proof that it was given
wrapped.py     module and optimizer behind one interface: one process and DDP here,
               sharded.py FSDP2, zero.py DeepSpeed
schedule.py    the learning rate
checkpoint.py  everything a resume needs, in safetensors and JSON
resume.py      going on: what must be as it was
ending.py      when a training is over
guards.py      loss spikes, exploding gradients, weights that are not finite
signals.py     SIGTERM and SIGINT
together.py    errors that all processes hear of
tracking.py    curves in wandb, tensorboard, mlflow, trackio, if the recipe names them
start.py       draft vocabulary, mask token and first weights
"""
