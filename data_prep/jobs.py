"""What a worker process is told to do, as plain JSON on its standard input, and what it reports back.

parent ── Job (JSON, once) ──► stdin of the worker
parent ◄── one JSON object a line ── stdout of the worker
               {"tokens": 64}                                      work done since the last report
               {"begin": 7}                                        batch 7 is begun
               {"done": 7, "rows": 32, "tokens": 1980, "cpu": 9.1}   batch 7 is sealed on the disk
               {"fault": "..."}                                    a fault the user can mend
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from data_prep.chat import Rendered
from data_prep.conversation import TalkPlan
from peagle_train.store.answers import AnswerRow
from peagle_train.store.writer import StateWriter


@dataclass(frozen=True)
class StatesPlan:
    """Where and how hidden states are stored."""

    directory: str
    fingerprint: str
    aux_layers: list[int]
    hidden_size: int
    dtype: str
    url: str | None = None  # where the states go in place of the directory

    def writer(self) -> StateWriter:
        """Raises PeagleError for a URL that is none or has no client here."""
        return StateWriter(
            Path(self.directory), self.fingerprint, self.aux_layers, self.hidden_size, self.dtype, self.url
        )


@dataclass(frozen=True)
class VllmPlan:
    """How a vLLM makes the states, where it does.

    python: its interpreter. log: what it prints. num_layers: of the target, L. longest: tokens of the longest
    row of the job. batch_tokens: most tokens of one pass. gpu: the one it may use; None: as it finds them.
    all_gpus: every matrix is split over all GPUs.
    """

    python: str
    log: str
    num_layers: int
    longest: int
    batch_tokens: int
    gpu: int | None = None
    all_gpus: bool = False


@dataclass(frozen=True)
class Job:
    """The share of one worker: batches to answer, or batches of answered rows to extract states from."""

    kind: Literal["answer", "extract"]
    target: str  # folder
    dtype: str
    device: str
    trust_remote_code: bool
    threads: int | None  # None: torch's own choice
    states: StatesPlan | None
    answers_dir: str = ""
    answers_fingerprint: str = ""
    max_new_tokens: int = 0
    talk: TalkPlan | None = None  # conversations of several turns
    prompts: dict[int, list[Rendered]] = field(default_factory=dict)  # kind "answer"
    answered: dict[int, list[AnswerRow]] = field(default_factory=dict)  # kind "extract"
    batch_tokens: int = 16384  # kind "extract": most tokens of one pass
    parallel: str = "none"  # as target.parallel
    vllm: VllmPlan | None = None  # kind "extract": what runs the target in place of transformers

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        value: dict[str, Any] = json.loads(text)
        plan, talk, vllm = value.pop("states"), value.pop("talk"), value.pop("vllm")
        prompts, answered = value.pop("prompts"), value.pop("answered")
        return cls(
            **value,
            states=StatesPlan(**plan) if plan else None,
            talk=TalkPlan(**talk) if talk else None,
            vllm=VllmPlan(**vllm) if vllm else None,
            prompts={int(key): [Rendered.from_json(row) for row in rows] for key, rows in prompts.items()},
            answered={int(key): [AnswerRow(**row) for row in rows] for key, rows in answered.items()},
        )


def even_batches(rows: Sequence[Rendered], batch_size: int) -> dict[int, list[Rendered]]:
    """Batches of rows of like length, longest first: little padding, and no tiny batch at the end.

    ceil(rows / batch_size) batches whose sizes differ by at most one. Depends on the rows and the batch
    size alone, never on how many workers there are: a batch's numbers can depend on its composition.
    """
    ordered = sorted(rows, key=lambda row: (-len(row.token_ids), row.row))
    count = -(-len(ordered) // batch_size)
    edges = [len(ordered) * batch // count for batch in range(count + 1)]
    return {batch: ordered[edges[batch] : edges[batch + 1]] for batch in range(count)}
