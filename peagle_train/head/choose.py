"""Which backend runs here: each is proven on the device, in the dtype, before anything is trained with it.

A proof runs a small packed batch, padding and windows included, through the backend's four ways of being
called (real slots, mask slots of layer 0 and of others, trained real slots of the last layer), and holds
values and gradients of queries, keys and values against the rule as a dense mask, computed wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from peagle_train.errors import PeagleError
from peagle_train.head.attention import RuleAttention
from peagle_train.head.backends import BACKENDS, Backend, backend_for
from peagle_train.head.batch import Document, PackedBatch, pack
from peagle_train.head.flash import interface
from peagle_train.head.kernels import kernel_for
from peagle_train.head.model import DrafterHead
from peagle_train.head.prefix import WIDTH
from peagle_train.head.sampling import sample_depths
from peagle_train.head.streams import cut, trained_prefix

NAMES = ("auto", "reference", *BACKENDS)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Norm of a difference over the norm of what it should be."""


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, head: DrafterHead) -> tuple[str, str]:
    """The backend for a training, and a sentence that says why.

    Args:
        name: one of NAMES; `auto` takes flash where it is proven, else sdpa.
        device: where the head trains.
        dtype: that activations have, bfloat16 under autocast.
        head: its sizes and windows are those of the proof.

    Raises:
        PeagleError: the backend cannot run here; says what would.
    """
    if name not in NAMES:
        raise PeagleError(f"train.backend is {name}; expected one of {', '.join(NAMES)}")
    if name == "reference":
        return name, "reference: a dense mask over all rows; its memory grows with the square of the length"
    if name != "auto":
        if (obstacle := _obstacle(name, device, dtype, head)) is not None:
            found, cure = obstacle
            raise PeagleError(f"train.backend: {name} cannot run here: {found}. {cure}.")
        return name, _describe(name, device, dtype, head)
    obstacle = _obstacle("flash", device, dtype, head)
    if obstacle is None:
        return "flash", _describe("flash", device, dtype, head)
    if (fault := _obstacle("sdpa", device, dtype, head)) is not None:
        raise PeagleError(f"train.backend: sdpa cannot run here: {fault[0]}. {fault[1]}.")
    return "sdpa", f"{_describe('sdpa', device, dtype, head)}; not flash: {obstacle[0]}"


def _describe(name: str, device: torch.device, dtype: torch.dtype, head: DrafterHead) -> str:
    text = f"{name}, {'proven' if device.type != 'cpu' else 'tested'} on {device.type} in {_short(dtype)}"
    if name != "sdpa":
        return text
    chosen = kernel_for(device, dtype, head.config.head_dim)
    passed = "".join(f"; not {refused}" for refused in chosen.refused)
    return f"{text}, prefixes by {chosen.kernel.name}{passed}"


def _obstacle(
    name: str, device: torch.device, dtype: torch.dtype, head: DrafterHead
) -> tuple[str, str] | None:
    """What keeps a backend of the streams from running here, and the cure."""
    instead = "Set train.backend: sdpa, or auto"
    if name != "sdpa" and head.config.method == "eagle3":
        return "the unroll of eagle3 has torch's attention alone", instead
    if (lacking := missing(name, device, dtype)) is not None:
        return lacking
    if device.type == "cpu":
        return None  # proven by the tests, on the machine that made them and on yours
    config = head.config
    fault = fault_of(
        backend_for(name),
        device,
        dtype,
        head_dim=config.head_dim,
        shared_by=config.num_attention_heads // config.num_key_value_heads,
        windows=set(config.windows),
    )
    cure = instead if name != "sdpa" else "Set target.device: cpu, and report this: `make gpu-check`"
    return None if fault is None else (f"compared with the rule on {device}, {fault}", cure)


def missing(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str] | None:
    """What device, dtype or installed packages lack for a backend, and the cure; None: it can be proven."""
    instead = "set train.backend: sdpa, or auto"
    if name == "flex" and device.type != "cuda":
        where = "on CPU" if device.type == "cpu" else f"on {device.type} that is known here"
        return f"flex_attention has no backward {where}", instead.capitalize()
    if name != "flash":
        return None
    if device.type != "cuda":
        return f"flash-attn runs on NVIDIA GPUs, and this is a {device.type}", instead.capitalize()
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn has no {_short(dtype)}", f"Set train.precision: bf16, or {instead}"
    try:
        interface()
    except ImportError as error:
        return f"the package flash-attn does not load ({error})", f"`pip install flash-attn`, or {instead}"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fault_of(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    shared_by: int,
    windows: Iterable[int | None],
) -> str | None:
    """What differs from the rule; None if nothing does. shared_by: query heads of each key head."""
    for window in windows:
        try:
            fault = _compare(backend, device, dtype, head_dim, shared_by, window)
        except (
            RuntimeError,
            TypeError,
            ValueError,
            AttributeError,
            NotImplementedError,
            ImportError,
        ) as error:
            said = str(error).strip().splitlines() or ["without a message"]
            fault = f"{type(error).__name__}: {said[0]}"
        if fault is not None:
            return fault if window is None else f"window {window}: {fault}"
    return None


def _compare(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    shared_by: int,
    window: int | None,
) -> str | None:
    batch = _batch(WIDTH.get(device.type, WIDTH["cuda"])).to(device)
    slots, rows = batch.num_slots, batch.positions.shape[0]
    trained = batch.supervised[: len(batch.chains.anchor)]
    generator = torch.Generator().manual_seed(1)

    def draw(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, head_dim, generator=generator).to(device, dtype)

    inputs = [draw(rows, 2 * shared_by), draw(rows, 2), draw(rows, 2)]
    grad = draw(rows + batch.num_mask_slots + len(trained), 2 * shared_by)
    (group,) = cut([window, window], batch, None)
    # In layer 0 any query will do for a position, if all its mask slots ask it.
    alike = torch.unique(
        torch.stack([batch.document, batch.positions])[:, slots:], dim=1, return_inverse=True
    )[1]

    def streams(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        real_k, real_v = k[:slots].transpose(0, 1), v[:slots].transpose(0, 1)
        own = k[slots:], v[slots:], group.chains[window]
        return torch.cat(
            [
                backend.real_slots(q[:slots], k[:slots], v[:slots], batch.slot_spans, window),
                backend.attend(q[alike], real_k, real_v, group.prefixes[0], own),
                backend.attend(q[slots:], real_k, real_v, group.prefixes[1], own),
                backend.attend(q[trained], real_k, real_v, trained_prefix(batch, window)),
            ]
        )

    def rule(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attention = RuleAttention(batch, window)
        entering, out = attention(torch.cat([q[:slots], q[alike]]), k, v), attention(q, k, v)
        return torch.cat([entering, out[slots:], out[trained]])

    wide = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    got = _with_gradients(streams, inputs, grad)
    want = _with_gradients(rule, [t.to(wide) for t in inputs], grad.to(wide))
    for name, ours, theirs in zip(("the output", "dq", "dk", "dv"), got, want, strict=True):
        if ours.shape != theirs.shape:
            return f"{name} has shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}"
        size, one = float(theirs.norm()), theirs.numel() ** 0.5
        # A row that sees one key has no gradient to its query: there only the rounding of ones is left.
        error = float((ours.to(wide) - theirs).norm()) / (size if size > 1e-3 * one else one)
        if not error <= TOLERANCE[dtype]:
            return f"{name} differs by {error:.1e}, allowed are {TOLERANCE[dtype]:.0e}"
    return None


def _with_gradients(attention: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _batch(width: int) -> PackedBatch:
    """Documents longer and shorter than a block of `width` anchors, one that keeps nothing, and padding."""
    generator, documents = torch.Generator().manual_seed(0), []
    for length, every in ((width + 60, max(width // 64, 1)), (37, 1), (9, 0), (width // 2, 3)):
        trainable = torch.zeros(length - 1, dtype=torch.int64)
        if every:
            trainable[length // 4 :: every] = 8
            trainable = torch.minimum(trainable, length - 2 - torch.arange(length - 1)).clamp(min=0)
        kept = sample_depths(trainable, 8, 0.9, generator=generator)
        nothing = torch.zeros(length, 1)
        documents.append(Document(torch.zeros(length, dtype=torch.int64), nothing, nothing, kept))
    slots = pack(documents).num_slots
    return pack(documents, pad_slots_to=slots + 3)
