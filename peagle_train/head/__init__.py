"""The drafter head, P-EAGLE's or EAGLE-3's: pure tensor code. No files, no launcher; sizes come as arguments.

alignment.py   which token predicts which, and which chains carry loss   (start here)
sampling.py    COD: which of those chains a training step keeps
batch.py       rows and chains packed into the tensors of one step
attention.py   the attention rule, and its two implementations
model.py       the network, as vLLM computes it
unroll.py      the EAGLE-3 baseline's way through it: one pass per depth, fed with its own states
loss.py        what is minimised
reference.py   all of the above once more, slow and obvious, in float64: what the rest is tested against
session.py     drafting with a KV cache
vocabulary.py  the reduced draft vocabulary
initialise.py  first weights, from the target or at random
io.py          a head in a folder, for checkpoints (vLLM's layout is `peagle_train.export`)
"""
