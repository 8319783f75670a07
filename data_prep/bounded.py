"""Bounded states: a producer makes them beside the training, and at most `states.cap` lies on the disk.

    training ── upcoming ──► queue of micro-batches ── while the cap has room ──► producer: a process with
    training ◄── read ────── files of micro-batches ◄──────────────────────────── the target in it
                             deleted with their last row read

Sizes are known from the rows' lengths, so a micro-batch is asked for only when its file has room. What a
step needs at once is made at once, whatever lies there: such a file is the one that goes next.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import data_prep
from data_prep.making import AnsweredRows, MadeStates, cut
from data_prep.online import device_of
from data_prep.producer import Order
from peagle_train.errors import CorruptError, PeagleError
from peagle_train.files import require_room, sha256_of
from peagle_train.run import Run
from peagle_train.store.answers import AnswerStore
from peagle_train.store.states import DTYPES, GB, StateRow, require_finite
from peagle_train.target.source import obtain
from peagle_train.tensors import load_tensors

IN_FLIGHT = 2
"""Micro-batches asked of the producer at a time: one at work, one next; what is urgent waits little."""

_HEADER = 4096  # of a file beside its tensors, at most
_LAST_LINES = 12


@dataclass
class _MicroBatch:
    number: int
    rows: list[int]
    bytes: int
    unread: set[int]
    file: Path | None = None
    sha256: str = ""


class BoundedStates(MadeStates):
    """States of answered rows that a producer makes under a cap: a `StatesSource`.

    Args:
        order: for the producer; its directory is emptied, and removed by `close`.
        rows: the answers.
        hidden_size: of the target.
        fingerprint: of what the states are made from.
        cap: bytes that may lie on the disk.

    Raises PeagleError if one row alone is larger than the cap, or the disk has no room for it.
    """

    def __init__(self, order: Order, rows: AnsweredRows, hidden_size: int, fingerprint: str, cap: int):
        super().__init__(rows, order.aux_layers, hidden_size, order.dtype, fingerprint)
        self._cap, self._budget = cap, order.batch_tokens
        self._directory = Path(order.directory)
        self._queue: deque[_MicroBatch] = deque()  # announced and not asked for
        self._batches: list[_MicroBatch] = []  # asked for and not read to the end
        self._count, self._fault = 0, ""
        self._changed = threading.Condition()
        largest = max(self._bytes([info.row]) for info in rows.info())
        if largest > cap:
            raise PeagleError(
                f"states.cap: found {cap / GB:g} GB; expected at least {largest / GB:.3g}, the states of the "
                "longest row; raise it, or write states.mode: online"
            )
        shutil.rmtree(self._directory, ignore_errors=True)
        require_room(self._directory.parent, cap, f"the cap of states ({cap / GB:g} GB)")
        self._directory.mkdir(parents=True)
        self._process = self._start(order)
        threading.Thread(target=self._listen, daemon=True).start()

    def upcoming(self, rows: Sequence[int]) -> None:
        """Told ahead which rows will be read next; those told together are made together."""
        with self._changed:
            for batch in cut(self._rows, rows, self._budget):
                self._queue.append(self._micro_batch(batch))
            self._ask()

    def read(self, row: int) -> StateRow:
        """One row with its states; the file goes once all of its rows were read.

        Raises PeagleError for an unknown index and for a producer that has ended, NotFiniteError for states
        that hold NaN or Inf.
        """
        with self._changed:
            batch = next((b for b in (*self._batches, *self._queue) if row in b.unread), None)
            if batch is None:
                batch = self._micro_batch([row])
            if batch not in self._batches:  # the step waits for it
                if batch in self._queue:
                    self._queue.remove(batch)
                self._send(batch)
            self._changed.wait_for(lambda: self._fault or batch.file is not None)
            if batch.file is None:
                raise PeagleError(self._fault)
            found = self._load(batch, row)
            batch.unread.discard(row)
            if not batch.unread:
                batch.file.unlink()
                self._batches.remove(batch)
                self._ask()
        return require_finite(found, f"row {row} of {self._rows.directory}")

    def close(self) -> None:
        """Ends the producer and removes its files."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _micro_batch(self, rows: list[int]) -> _MicroBatch:
        self._count += 1
        return _MicroBatch(self._count, rows, self._bytes(rows), set(rows))

    def _bytes(self, rows: Sequence[int]) -> int:
        width = (len(self.aux_layers) + 1) * self.hidden_size * DTYPES[self.dtype].itemsize
        return sum((self._rows.info_of(row).tokens - 1) * width for row in rows) + _HEADER

    def _ask(self) -> None:
        """Asks for what comes next, as far as the cap has room. Call it under the lock."""
        while self._queue and sum(batch.file is None for batch in self._batches) < IN_FLIGHT:
            if sum(batch.bytes for batch in self._batches) + self._queue[0].bytes > self._cap:
                return
            self._send(self._queue.popleft())

    def _send(self, batch: _MicroBatch) -> None:
        self._batches.append(batch)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"number": batch.number, "rows": batch.rows}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the listener tells

    def _load(self, batch: _MicroBatch, row: int) -> StateRow:
        assert batch.file is not None
        if batch.sha256:
            if sha256_of(batch.file) != batch.sha256:
                raise CorruptError(f"{batch.file}: differs from its checksum; is the disk sound? Start again")
            batch.sha256 = ""  # proven
        info = self._rows.info_of(row)
        tensors = load_tensors(batch.file, [f"{row}.aux", f"{row}.last"])
        return StateRow(
            row,
            info.set,
            info.id,
            self._rows.token_ids(row),
            self._rows.loss_mask(row),
            tensors[f"{row}.aux"],
            tensors[f"{row}.last"],
            info.prompt_length,
        )

    def _start(self, order: Order) -> subprocess.Popen[str]:
        root = str(Path(data_prep.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        with (self._directory / "producer.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "data_prep.producer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        assert process.stdin is not None
        process.stdin.write(order.to_json() + "\n")
        process.stdin.flush()
        return process

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._hear(json.loads(line))
        status = self._process.wait()
        with self._changed:
            self._fault = self._fault or self._last_words(status)
            self._changed.notify_all()

    def _hear(self, report: dict[str, Any]) -> None:
        with self._changed:
            if "fault" in report:
                self._fault = report["fault"]
            if "number" in report:
                batch = next(b for b in self._batches if b.number == report["number"])
                batch.sha256, batch.file = report["sha256"], self._directory / report["file"]
                self._ask()
            self._changed.notify_all()

    def _last_words(self, status: int) -> str:
        log = self._directory / "producer.log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        lines = "\n".join(f"  | {line}" for line in text.strip().splitlines()[-_LAST_LINES:])
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"the producer of states ended {how}; the same command goes on. Its last lines:\n{lines}"


def open_bounded(run: Run, fingerprint: str, console: Console, target: Any = None) -> BoundedStates:
    """The bounded states of a run: starts this process's producer.

    Raises PeagleError: no finished answers, a cap that is too small or larger than the disk.
    """
    recipe, rank = run.recipe, os.environ.get("RANK", "0")
    states, section = recipe.states, recipe.target
    assert states.cap is not None  # a rule of the recipe
    order = Order(
        answers=str(run.answers_dir),
        target=str(obtain(section, console)),
        section=section.model_copy(update={"device": device_of(section)}).model_dump(),
        aux_layers=list(recipe.head.aux_layers),
        dtype=states.dtype,
        batch_tokens=states.batch_tokens,
        directory=str(run.directory / f".bounded-{rank}"),
    )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rows = AnsweredRows(AnswerStore(run.answers_dir))
    return BoundedStates(order, rows, run.facts.hidden_size, fingerprint, int(states.cap * GB) // world)
