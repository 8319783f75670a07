"""What each process of tests/training/test_distributed.py runs, and the single process it is compared with.

A way is `ddp`, `zero1`, `zero2`, `zero3` or `fsdp2`, set as a launcher would set it. All ways run in one
launch one after the other, for starting processes costs more than the steps. OUT gets what every way came to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from peagle_train.errors import PeagleError
from peagle_train.recipe.schema import CodSection, TrainSection
from peagle_train.store.documents import Documents, slot_counts
from peagle_train.store.states import StateRow
from peagle_train.training.checkpoint import Standing
from peagle_train.training.data import Stream
from peagle_train.training.launch import make_accelerator
from peagle_train.training.loop import Loop, TrainingSet
from peagle_train.training.module import DraftTraining
from tests.head.toys import CONFIG, toy_head
from tests.training.ranks import asked_for

STEPS, HALF = 6, 3
MICRO_BATCHES = 4
"""Of one step, over all processes."""
LENGTHS = [40, 12, 33, 9, 26, 18, 45, 11, 14, 10]
POSITIONS = 4


class Rows:
    """A store in memory: rows of very unequal lengths, the last few tokens of each generated."""

    def __init__(self) -> None:
        self.rows = [_row(i, n) for i, n in enumerate(LENGTHS)]

    def read(self, row: int) -> StateRow:
        return self.rows[row]

    def loss_mask(self, row: int) -> torch.Tensor:
        return self.rows[row].loss_mask

    def upcoming(self, rows: list[int]) -> None:
        """They are here already."""


def _row(index: int, length: int) -> StateRow:
    generator = torch.Generator().manual_seed(index)
    prompt = 3 + index % 4
    return StateRow(
        index,
        "train",
        f"row {index}",
        torch.randint(4, CONFIG.vocab_size, (length,), generator=generator),
        torch.arange(length) >= prompt,
        torch.randn(length - 1, CONFIG.aux_width, generator=generator),
        torch.randn(length - 1, CONFIG.target_hidden_size, generator=generator),
        prompt,
    )


def make_loop(directory: Path, accelerator: Accelerator, **changes: Any) -> Loop:
    """A loop over the toy rows whose steps hold MICRO_BATCHES, however many processes share them."""
    world = accelerator.num_processes
    section = TrainSection(
        **{
            "positions": POSITIONS,
            "cod": CodSection(rate=0.8),
            "steps": STEPS,
            "batch_tokens": 48,
            "accumulate": MICRO_BATCHES // world,
            "learning_rate": 5e-3,
            "weight_decay": 0.1,
            "clip_norm": 0.5,
            "warmup_steps": 2,
            "precision": "fp32",
            **changes,
        }
    )
    store: Any = Rows()
    rows = list(range(len(LENGTHS)))
    stream = Stream(
        rows,
        slot_counts(store, rows),
        0,
        batch_tokens=section.batch_tokens,
        accumulate=section.accumulate,
        world=world,
    )
    # Not all is trained, and one buffer is not floating: what wrappers split must be told apart.
    head = toy_head(dtype=torch.float32, own_embeddings=False)
    output = torch.nn.Linear(CONFIG.target_hidden_size, CONFIG.draft_vocab_size, bias=False)
    with torch.no_grad():
        output.weight.copy_(torch.randn(output.weight.shape, generator=torch.Generator().manual_seed(9)))
    module = DraftTraining(head, output, POSITIONS, section.loss)
    data = TrainingSet(Documents(store, POSITIONS), stream, rows[:7])
    directory.mkdir(parents=True, exist_ok=True)
    return Loop(accelerator, module, data, section, seed=0, directory=directory, console=Console(quiet=True))


def fresh_accelerator() -> Accelerator:
    """An accelerator made anew from the environment."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    target, track = SimpleNamespace(device="auto"), SimpleNamespace(log_with=[])
    recipe = SimpleNamespace(target=target, track=track)
    return make_accelerator(SimpleNamespace(recipe=recipe, training_dir=Path()))  # type: ignore[arg-type]


def results(loop: Loop, directory: Path, start: int = 0, steps: int = STEPS) -> dict[str, Any]:
    """Records of some steps, and the validation after them."""
    records = [loop._step(step) for step in range(start, steps)]
    loop.standing = Standing(best_acceptance=POSITIONS + 1.0)  # no head is good enough to be written
    loop._validate()
    lines = (directory / "log.jsonl").read_text().splitlines() if loop.accelerator.is_main_process else []
    return {"records": records, "validation": [json.loads(line) for line in lines][-1:]}


class Gathered(TorchDispatchMode):
    """Counts the numbers that all-gathers deliver."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func) or "all_gather_into_tensor" in str(func):
            outputs = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.numbers += sum(o.numel() for o in _flat(outputs))
        return func(*args, **(kwargs or {}))


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in value:
            yield from _flat(part)


def gathers(loop: Loop, split: int) -> list[float]:
    """How often all split parameters were gathered in each micro-batch of three steps, forward and backward.

    Args:
        split: numbers in the parameters that this way splits.
    """
    wrapped, counts = loop.wrapped, []
    micro_batch = wrapped.micro_batch

    def counted(*args: Any, **kwargs: Any) -> Any:
        with Gathered() as counter:
            sums = micro_batch(*args, **kwargs)
        counts.append(counter.numbers / split)
        return sums

    wrapped.micro_batch = counted  # type: ignore[method-assign]
    for step in range(3):
        loop._step(step)
    return counts


def run(way: str, out: Path) -> None:
    """One way: an uninterrupted run; the same one with a skipped step, saved and loaded half-way; gathers."""
    whole = make_loop(out / way / "whole", fresh_accelerator())
    outcome = {"found": whole.wrapped.found, **results(whole, out / way / "whole")}
    final = whole.wrapped.head_tensors()

    first = make_loop(out / way / "half", fresh_accelerator())
    # A step that is not taken leaves nothing behind.
    taken, first.wrapped.step = first.wrapped.step, lambda rate: first.wrapped.skip()  # type: ignore[method-assign]
    first._step(HALF)
    first.wrapped.step = taken  # type: ignore[method-assign]
    for step in range(HALF):
        first._step(step)
    saved, optimizer = first.wrapped.head_tensors(), first.wrapped.optimizer_tensors()
    if optimizer:
        save_file(optimizer, out / f"{way}-optimizer-{first.wrapped.rank}.safetensors")
    first.accelerator.wait_for_everyone()
    again = make_loop(out / way / "again", fresh_accelerator())
    own, whole_state = (out / f"{way}-optimizer-{r}.safetensors" for r in (first.wrapped.rank, 0))
    again.wrapped.load(saved, load_file(own if own.is_file() else whole_state))
    resumed = results(again, out / way / "again", HALF)
    same = all(torch.equal(t, final[n]) for n, t in again.wrapped.head_tensors().items())
    outcome["resumed"] = same and resumed["records"] == outcome["records"][HALF:]
    outcome["saved"] = sum(t.numel() for t in optimizer.values())

    if way in ("zero3", "fsdp2"):
        head = toy_head(own_embeddings=False)
        split = sum(p.numel() for p in head.parameters() if p.requires_grad or way == "zero3")
        outcome["gathers"] = gathers(make_loop(out / way / "gathers", fresh_accelerator()), split)
    save_file(final, out / f"{way}-{whole.accelerator.process_index}.safetensors")
    (out / f"{way}-{whole.accelerator.process_index}.json").write_text(json.dumps(outcome))


def demoted(out: Path) -> None:
    """DeepSpeed that ACCELERATE_USE_CPU turns into DDP: what is said about it."""
    with asked_for("zero2", out):
        os.environ["ACCELERATE_USE_CPU"] = "true"
        try:
            fresh_accelerator()
        except PeagleError as error:
            (out / "demoted.txt").write_text(str(error))


def main(out: Path, *ways: str) -> None:
    for way in ways:
        if way == "demoted":
            demoted(out)
            continue
        with asked_for(way, out):
            run(way, out)
    torch.distributed.destroy_process_group()
