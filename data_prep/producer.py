"""A process that makes states for a training beside it: `python -m data_prep.producer`.

standard input    one JSON object a line: first the `Order`, then micro-batches {"number": 7, "rows": [12, 3]}
standard output   {"loaded": true}, then of each {"number", "file", "bytes", "sha256"}; or {"fault"}

It makes what it is asked for, in that order, and holds nothing: who asks decides how much lies on the disk.
A file has the tensors of a store's shard, whole.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.child import end_with_parent, reports_to_parent
from data_prep.making import AnsweredRows, Maker
from peagle_train.errors import PeagleError
from peagle_train.files import atomic_file, sha256_of
from peagle_train.recipe.schema import TargetSection
from peagle_train.store.answers import AnswerStore
from peagle_train.store.states import StateRow
from peagle_train.target.adapter import Target
from peagle_train.tensors import save_tensors


@dataclass(frozen=True)
class Order:
    """What a producer must know before its first micro-batch."""

    answers: str  # folder
    target: str  # folder
    section: dict[str, Any]  # TargetSection, with the device of this process
    aux_layers: list[int]
    dtype: str
    batch_tokens: int
    directory: str  # where the files go

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> int:
    """Works until its standard input ends; returns the exit status."""
    end_with_parent()
    say = reports_to_parent()
    try:
        order = Order(**json.loads(sys.stdin.readline()))
        maker = _maker(order)
        say(loaded=True)
        for request in _requests():
            path = Path(order.directory) / f"{request['number']}.safetensors"
            with atomic_file(path) as temporary:
                save_tensors(temporary, _tensors(maker.made(request["rows"])))
            say(number=request["number"], file=path.name, bytes=path.stat().st_size, sha256=sha256_of(path))
    except PeagleError as error:
        say(fault=str(error))
        return 1
    return 0


def _requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _maker(order: Order) -> Maker:
    rows = AnsweredRows(AnswerStore(Path(order.answers)))
    target = Target.of(TargetSection(**order.section), Path(order.target))
    return Maker(target, rows, order.aux_layers, order.dtype)


def _tensors(rows: list[StateRow]) -> dict[str, torch.Tensor]:
    """Tokens and masks are known to who asks."""
    return {f"{row.row}.{name}": getattr(row, name).contiguous() for row in rows for name in ("aux", "last")}


if __name__ == "__main__":
    sys.exit(main())
