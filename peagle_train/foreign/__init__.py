"""Heads of other makers: read as vLLM reads them, and written in our layout.

    source.py     a folder or a Hub id; the target it shall draft for
    config.py     config.json in every spelling vLLM knows -> the keys of `export/contract.py`
    places.py     facts that stand in several places of a config.json: one value, or refused
    tensors.py    weights files in every spelling -> the tensors of `export/contract.py`
    read.py       both together, held against the target: a head, or all its faults   (start here)
    bring.py      `peagle import`: read, write, prove, and say how to go on

Nothing is guessed: a key that is left out has the value vLLM would give it, or the head is refused. What
was put into other words is listed, printed and recorded. No weight is ever rounded.
"""
