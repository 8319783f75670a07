"""Prompts: what the target is asked. A source is a name here or the path of a JSONL file.

    stdlib       requests made from Python's standard library, split by module     prompts/stdlib.py
    humaneval    the 164 HumanEval problems, for reporting only                     prompts/humaneval.py
    PATH.jsonl   rows with `prompt` or `messages`                                    prompts/jsonl.py

`load` gives the candidates of one set, `collect` those of all sets of a run; `prove_disjoint` looks at
those that were taken.
"""

from data_prep.prompts.base import Message, Prompt
from data_prep.prompts.collect import Candidates, collect, load, prove_disjoint, sources_fingerprint

__all__ = ["Candidates", "Message", "Prompt", "collect", "load", "prove_disjoint", "sources_fingerprint"]
