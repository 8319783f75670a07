"""What a head learns in N CPU-seconds: ours against the one of speculators 0.9.0, on the same stored states.

    make compare-peer                                            SmolLM2, 120 CPU-seconds a training
    make compare-peer ARGS="--seconds 5 --rates 1e-3 --peer-rates 1e-3"

learn.py       one training as a process of its own: rows, rate and clock are the same for both sides
ours.py        our head, as the recipe says (scripts/learning)
peer.py        theirs, as its own code builds them by default, in an environment of its own (.venv-peer)
measure.py     the head a job left, proven to be read right
__main__.py    a small grid of learning rates a side; the table

Both sides run on one thread, read the same rows in the same order, as many a step, and stop when their
process has spent its CPU-seconds on training; reading the rows counts, the start does not. The learning rate
rises and falls with the share of the time that is spent. Neither validates while it trains. The best rate of
a side is the one whose head is accepted most on the validation rows; the held-out sets are only measured.

The heads are of one size and draft from one vocabulary. What else differs is each side's own: first weights,
what is frozen, norms, COD, loss. A head is read from the folder the peer saves, as `peagle import` reads it,
and must give the peer's own logits.

What is finished in OUTPUT is not done again, whatever has changed in the code since: take another OUTPUT.
"""
