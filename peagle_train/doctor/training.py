"""A few steps of training on a handful of rows, by the loop that trains for hours.

What must be true afterwards is what a curve does not show: every weight is finite, every norm has left its
place (in bfloat16 without float32 masters it never would), and the placeholders learn: the state
`mask_hidden` and the mask token's row of the embeddings have gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rich.console import Console
from torch import Tensor

from peagle_train.doctor.patient import STEPS, Line, Patient, failure, ok
from peagle_train.head.batch import pack
from peagle_train.head.choose import choose_backend
from peagle_train.head.engine import EngineSettings
from peagle_train.head.loss import depth_weights
from peagle_train.store.documents import Documents, slot_counts, trainable_rows
from peagle_train.training.data import Stream
from peagle_train.training.launch import make_accelerator
from peagle_train.training.loop import Loop, TrainingSet
from peagle_train.training.module import DraftTraining
from peagle_train.training.start import make_start

_QUIET = Console(quiet=True)


def steps(patient: Patient) -> Iterator[Line]:
    """Initialises the head as the recipe says and trains it; the target is let go of afterwards."""
    assert patient.target is not None
    run, store = patient.run, patient.store
    recipe = run.recipe
    train, directory = recipe.train, run.training_dir
    rows, validation = trainable_rows(store, "train"), trainable_rows(store, "validation")
    if not rows or not validation:
        yield failure(
            f"{len(rows)} training and {len(validation)} validation rows have a trainable chain",
            "answers of one token teach nothing: raise data.max_new_tokens, or look at the rows below",
        )
        return
    directory.mkdir(parents=True)
    start = make_start(recipe, patient.target, store, rows, directory, _QUIET)
    patient.table, patient.target = patient.target.embedding_table().cpu().clone(), None
    torch.manual_seed(recipe.seed)
    weights = depth_weights(train.depth_weights, train.positions, train.cod.rate, train.cod.floor)
    module = DraftTraining(start.head, start.target_output, train.positions, train.loss, weights)
    accelerator = make_accelerator(run)
    dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
    backend, why = choose_backend(train.backend, accelerator.device, dtype, start.head)
    module.engine = EngineSettings(backend=backend)
    stream = Stream(rows, slot_counts(store, rows), recipe.seed, batch_tokens=train.batch_tokens)
    data = TrainingSet(Documents(store, train.positions), stream, validation)
    before = _copy(start.head)
    loop = Loop(accelerator, module, data, train, seed=recipe.seed, directory=directory, console=_QUIET)
    loop.run()
    patient.loop, patient.head, patient.before = loop, loop.head, before
    yield ok(
        f"{STEPS} steps on {len(rows)} rows in {train.precision} on {accelerator.device}, "
        f"K = {train.positions}; attention: {why}"
    )


def moved(patient: Patient) -> Iterator[Line]:
    """Every weight is finite, every trained one has left its place."""
    after, still, bad = _copy(patient.head), [], []
    for name, parameter in patient.head.named_parameters():
        if not bool(torch.isfinite(after[name]).all()):
            bad.append(name)
        elif parameter.requires_grad and torch.equal(after[name], patient.before[name]):
            still.append(name)
    if bad:
        yield failure(
            f"not finite after {STEPS} steps: {', '.join(bad)}",
            "lower train.learning_rate, or set train.precision=fp32",
        )
    norms = [name for name in still if patient.head.get_parameter(name).ndim == 1]
    if still:
        what = "norms stay exactly where they were" if norms == still else "weights do not move"
        yield failure(
            f"{what}: {', '.join(still[:4])}{' ...' if len(still) > 4 else ''}",
            "no gradient arrives there, or the weights are too coarse for the learning rate",
        )
    if not bad and not still:
        count = sum(parameter.requires_grad for parameter in patient.head.parameters())
        yield ok(f"{count} tensors are finite and have moved, RMSNorm scales among them")


def gradients(patient: Patient) -> Iterator[Line]:
    """The placeholders' gradients, after the steps: at step 0 the embeddings' half of layer 0 is zero."""
    head, loop = patient.head, patient.loop
    documents = [loop.data.documents.full(row) for row in loop.data.stream.rows]
    batch = pack(documents).to(loop.accelerator.device)
    head.zero_grad(set_to_none=True)
    (loop.training(batch).loss / loop.training.weight_of(batch)).backward()
    mask = head.config.mask_token_id
    if head.mask_hidden is None or mask is None:
        yield ok("eagle3 has no placeholders")
        return
    yield _alive("mask_hidden", _size(head.mask_hidden.grad), "the state of mask slots")
    if head.config.own_embeddings:
        grad = head.embed_tokens.weight.grad
        what = f"row {mask} of embed_tokens, the mask token's"
        yield _alive("the mask token's embedding", _size(None if grad is None else grad[mask]), what)
    else:
        yield ok(f"row {mask} of the embeddings is the target's own: shared, not trained")
    head.zero_grad(set_to_none=True)


def _alive(name: str, size: float, what: str) -> Line:
    if size > 0:
        return ok(f"{name} learns: its gradient is {size:.2g}")
    return failure(
        f"{name} has a gradient of {size:g}: {what} never learns",
        "the head must read it in every mask slot, and the table must not leave a row out (padding_idx)",
    )


def _size(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.norm())


def _copy(head: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu().clone() for name, parameter in head.named_parameters()}
