"""The drafter head, P-EAGLE's or EAGLE-3's: pure tensor code. No files, no launcher; sizes come as arguments.

what is learned
    alignment.py   which token predicts which, and which chains carry loss   (start here)
    sampling.py    COD: which of those chains a training step keeps
    batch.py       rows and chains packed into the tensors of one step
    attention.py   the attention rule, and its slow implementation: a dense mask
    config.py, rope.py, model.py   the network, as vLLM computes it
    loss.py        what is minimised, and its gradient
    reference.py   all of the above once more, slow and obvious, in float64: what the rest is tested against

how it is computed (docs/engine.md)
    engine.py      loss and gradients of a batch in the least memory   (start here)
    streams.py     real slots once, mask slots in groups; forward.py: both as one computation
    unroll.py      the EAGLE-3 baseline's way: one pass per depth, fed with its own states
    prefix.py, chains.py, causal.py   attention to the real slots, to the own chain, among real slots
    alike.py       mask slots that ask the same in layer 0, answered once
    kernels.py     what runs where no mask is needed, proven on the device before it is used
    backends.py    the ways to compute attention, by name: sdpa, flash (flash.py), flex (flex.py)
    choose.py      proves a backend on the device, and picks for `auto`
    matmul.py      products of activations and weights, by the faster of two libraries
    fused.py       pointwise operations whose backward keeps little
    memory.py      bytes per unit of work

around it
    session.py     drafting with a KV cache; acceptance.py: how many drafts are accepted
    vocabulary.py  the reduced draft vocabulary
    initialise.py  first weights, from the target or at random
    io.py          a head in a folder, for checkpoints (vLLM's layout is `peagle_train.export`)
"""
