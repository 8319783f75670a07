"""Prompts: what the target is asked. A source is a name here or the path of a JSONL file.

    stdlib       requests made from Python's standard library, split by module     prompts/stdlib.py
    humaneval    the 164 HumanEval problems, for reporting only                     prompts/humaneval.py
    PATH.jsonl   rows with `prompt` or `messages`                                    prompts/jsonl.py

`load` gives the prompts of one set; `collect` those of all sets of a run and proves them disjoint.
"""

from data_prep.prompts.base import Message, Prompt
from data_prep.prompts.collect import collect, load, sources_fingerprint

__all__ = ["Message", "Prompt", "collect", "load", "sources_fingerprint"]
