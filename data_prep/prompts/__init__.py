"""Prompts: what the target is asked.

rows.py           rows of files, wherever they lie        hub.py      rows of the Hub
shapes.py         from a row to a prompt                  presets.py  data sets by name
stdlib.py         requests made from Python's library     humaneval.py
rejects.py        bad rows                                contamination.py
collect.py        the candidates of every set
"""

from data_prep.prompts.base import Answered, Message, Prompt
from data_prep.prompts.collect import Candidates, collect, prove_disjoint, sources_fingerprint
from data_prep.prompts.rejects import Rejects

__all__ = [
    "Answered",
    "Candidates",
    "Message",
    "Prompt",
    "Rejects",
    "collect",
    "prove_disjoint",
    "sources_fingerprint",
]
