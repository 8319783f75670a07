"""What users pay for: how many tokens one verification of the target yields.

    stage.py   the stage: every held-out set, offline and through the loop   (start here)
    loop.py    speculative decoding, readable, with KV caches for target and head

The offline measure itself is pure tensor code: `peagle_train.head.acceptance`.
"""
