"""How fast a states store is read, against how fast a training step consumes it.

    .venv/bin/python scripts/store_speed.py                          rows and head of recipes/smollm2.yaml
    .venv/bin/python scripts/store_speed.py --rows 200 --tokens 4096 --layers 4

Writes a store of made-up states to a temporary folder below --folder, reads it in several ways, and times the
step of `peagle train` on rows of the same shape: forward and backward, without the optimizer, so it consumes
more than a training does. One thread, wall time; tokens are those of the rows, prompt included.

    as they lie                rows in the order of the files
    at random                  as a training asks for them
    at random, announced       the same, read ahead by a thread: what a training waits for
    at random, bytes alone     neither proven nor looked at for NaN: what that costs
    at random, cold            the files first dropped from the page cache: what the disk gives
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `scripts`, when run as a file

from peagle_train.store import StateRow, StateStore, StateWriter, bytes_per_token
from scripts.side_by_side.case import Case, Shape
from scripts.side_by_side.ours import Ours

BATCH = 64


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    shape = Shape(
        num_layers=options.layers,
        draft_vocab_size=options.draft_vocabulary,
        positions=options.positions,
        rate=options.rate,
        train_embeddings=False,
    )
    each = bytes_per_token(shape.aux_states, shape.hidden_size, options.dtype)
    print(
        f"{options.rows:,} rows of {options.tokens:,} tokens, {options.dtype}: up to {each:,} bytes a token"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds = _seconds(lambda: _write(Path(folder), shape, options))
        total = options.rows * options.tokens
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(
            f"written: {size / 1e6:,.0f} MB, {total / seconds:,.0f} tokens/s, "
            f"{size / seconds / 1e6:,.0f} MB/s"
        )
        step = _step_rate(shape, options)
        print(f"a training step consumes {step:,.0f} tokens/s\n")
        print(f"{'reading':<24}{'tokens/s':>12}{'MB/s':>8}{'times a step':>14}")
        for name, read in _ways(Path(folder), options.rows).items():
            rate = total / min(_seconds(read) for _ in range(options.repeat))
            print(f"{name:<24}{rate:>12,.0f}{rate * size / total / 1e6:>8,.0f}{rate / step:>14,.0f}")


def _ways(folder: Path, count: int) -> dict[str, Callable[[], None]]:
    store = StateStore(folder)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()

    def read(rows: Sequence[int]) -> None:
        for row in rows:
            _touch(store.read(row))

    def announced() -> None:
        store.upcoming(order[:4])
        for place, row in enumerate(order):
            store.upcoming(order[place + 4 : place + 5])
            _touch(store.read(row))

    def alone() -> None:
        for row in order:
            batch, entry = store._rows[row]
            store._shards.read(row, batch.states.file, entry.states)

    def cold() -> None:
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read(order)

    return {
        "as they lie": lambda: read(range(count)),
        "at random": lambda: read(order),
        "at random, announced": announced,
        "at random, bytes alone": alone,
        "at random, cold": cold,
    }


def _touch(row: StateRow) -> None:
    """A row is a copy in memory already; its last number says so."""
    float(row.aux[-1, -1])


def _write(folder: Path, shape: Shape, options: argparse.Namespace) -> None:
    layers = range(1, shape.aux_states + 1)
    writer = StateWriter(folder, "made up", layers, shape.hidden_size, options.dtype)
    for batch, first in enumerate(range(0, options.rows, BATCH)):
        rows = [_row(index, shape, options) for index in range(first, min(first + BATCH, options.rows))]
        writer.write_batch(batch, rows)
    writer.seal()


def _row(index: int, shape: Shape, options: argparse.Namespace) -> StateRow:
    case = _case(index, shape, options)
    return StateRow(
        index,
        "train",
        f"{index}",
        case.token_ids,
        case.loss_mask,
        case.aux[:-1],
        case.last[:-1],
        options.prompt,
    )


def _case(index: int, shape: Shape, options: argparse.Namespace) -> Case:
    generator, tokens = torch.Generator().manual_seed(index), options.tokens
    ids = torch.randint(shape.mask_token_id + 1, shape.vocab_size, (tokens,), generator=generator)
    mask = torch.arange(tokens) >= options.prompt
    width = shape.aux_states * shape.hidden_size
    aux = torch.randn(tokens, width, generator=generator)
    return Case(ids, mask, aux, torch.randn(tokens, shape.hidden_size, generator=generator))


def _step_rate(shape: Shape, options: argparse.Namespace) -> float:
    """Tokens of rows that a step consumes in a second."""
    ours, case = Ours(shape), _case(0, shape, options)
    ours.step(case, 0)
    return options.tokens / min(_seconds(lambda draw=draw: ours.step(case, draw)) for draw in range(5))


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="how fast a states store is read, against a training step")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=184, help="of a row")
    parser.add_argument("--prompt", type=int, default=120, help="of these, the prompt")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--draft-vocabulary", type=int, default=4096)
    parser.add_argument("--positions", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.4, help="r of COD")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", help="where the store is written for the time being; left out: /tmp")
    return parser.parse_args()


if __name__ == "__main__":
    main()
