"""One training step of a P-EAGLE head, ours against the one of speculators 0.9.0, in one run.

    make side-by-side                                              S = 512, 1k, 2k, 4k
    make side-by-side ARGS="--sizes 512 --repeats 5"
    make side-by-side ARGS="--sizes= --ours-only 8192,20480"       ours alone

case.py       the shape of the head, and the document both train on
worker.py     one side as a process of its own: builds once, makes steps on demand, measures each
ours.py       our step: COD draw, packing, forward, backward
peer.py       theirs, in an environment of its own (.venv-peer)
floor.py      how many operations the exact result needs, and how fast this machine does them
__main__.py   lets the two take turns, prints the table, writes the JSON

Both sides run on one thread, take turns step by step, and train the same parameters on the same document.
A step is what stands between the stored states and the gradients: forward and backward, with the COD draw
and all masks and indices that follow from it. Reading the data, clipping and the optimizer are left out on
both sides; they cost both the same.
"""
