"""Which settings learn most in N CPU-seconds: an ablation table on stored states, and what follows from it.

    make ablate                                                SmolLM2, 120 CPU-seconds a training, two seeds
    make ablate ARGS="--plan"                                  what would be trained, and how long it takes
    make ablate ARGS="--seconds 4 --seeds 0 --only layers,k"   a quick look at two groups
    make ablate ARGS="--write-docs"                            the tables also go into docs/ablation.md

grid.py        the variants: overrides of the recipe, in groups
bench.py       what all trainings share: states, target, the two held-out sets
job.py         one training as a process of its own: by the clock, on one thread, measured at its end
work.py        trains what is not there yet, several at a time
choose.py      difference of a variant from the base, prompt by prompt; winners and their combination
report.py      tables for the terminal and for the docs
__main__.py    the command

The base is the recipe as it is; a variant changes one thing of it, so a winner may not win beside others: the
combination of the winners of all groups is trained too. A variant wins its group if it is accepted more than
the base with every seed, 95 % of the paired bootstrap lie above zero, and no other of the group gains more.
K has no winner: it is chosen by what it costs where the head is served.
All this is read off one held-out set. Another set is opened once, at the end, for the base and the
combination alone; nothing is chosen by it, and a part of the groups (--only) does not open it.

Every head drafts evaluate.k tokens, or as many as it has positions if these are fewer. One with fewer can
deliver less: lengths stand side by side as tokens per pass of the target, at the K each is served with.

What is finished in OUTPUT is not done again, as long as recipe, states, seconds, seed and the code that
trains are the same: an interrupted run goes on. CPU-seconds of a busy machine hold less work than those of
an idle one: compare trainings of one run, with the same number of workers.
"""
