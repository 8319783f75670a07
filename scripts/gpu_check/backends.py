"""Kernels and backends against the rule, and whole heads against the backend `reference`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from peagle_train.errors import PeagleError
from peagle_train.head.alignment import trainable_depths
from peagle_train.head.backends import BACKENDS, backend_for
from peagle_train.head.batch import Document, PackedBatch, pack
from peagle_train.head.choose import TOLERANCE, choose_backend, fault_of, missing
from peagle_train.head.config import FULL, SLIDING, HeadConfig
from peagle_train.head.engine import EngineSettings, loss_and_gradients
from peagle_train.head.flash import FlashAttn
from peagle_train.head.kernels import CANDIDATES, Tiled, kernel_for
from peagle_train.head.kernels import fault_of as kernel_fault
from peagle_train.head.model import DrafterHead
from peagle_train.head.rope import Rope
from peagle_train.head.sampling import sample_depths
from scripts.gpu_check.lines import Check, Failed, Settings, Skip, skip

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = {"GPT-OSS": (64, 8), "Qwen3-Coder": (128, 8), "SmolLM2": (64, 3)}
"""Dimensions of an attention head, and query heads of each key head."""

POSITIONS = 4
COD_RATE = 0.8
CONFIG = HeadConfig(
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=512,
    draft_vocab_size=384,
    target_hidden_size=128,
    aux_layers=(1, 2, 4),
    mask_token_id=3,
    rms_norm_eps=1e-5,
    rope=Rope(10_000.0),
    max_position_embeddings=4096,
    own_embeddings=True,
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3, biases": dict(drafter="qwen3", attention_bias=True),
    "windows": dict(num_layers=3, layer_types=(SLIDING, FULL, SLIDING), sliding_window=50),
    "full vocabulary": dict(draft_vocab_size=512, norm_before_residual=True),
}
FLOAT32_ERROR = 1e-4
"""Norm of the difference of all gradients over their norm, between two orders of summation."""

BFLOAT16_ERROR = 2.0
"""In bfloat16 a backend may be as far from float32 as this many times the reference in bfloat16."""


def kernels(settings: Settings) -> Iterator[Check]:
    """The private operators of torch and flash-attn, merged values in the backward included."""
    device = torch.device(settings.device)
    kernels: list[type[Any]] = [*CANDIDATES[device.type], FlashAttn, Tiled]
    for kernel in kernels:
        for dtype in DTYPES:
            for dim in sorted({dim for dim, _ in SHAPES.values()}):
                name = f"{kernel.name}, {_short(dtype)}, {dim} dimensions"
                yield name, partial(_kernel, kernel(), device, dtype, dim)


def _kernel(kernel: Any, device: torch.device, dtype: torch.dtype, dim: int) -> tuple[str, dict[str, Any]]:
    if isinstance(kernel, FlashAttn) and (lacking := missing("flash", device, dtype)) is not None:
        raise Skip(lacking[0])
    fault = kernel_fault(kernel, device, dtype, dim)
    chosen = kernel_for(device, dtype, dim).kernel.name
    if fault is not None and kernel.name != chosen:
        # torch has some for half precision alone; training takes the next one, which is proven.
        raise Skip(f"never used here: {fault}; {chosen} is")
    if fault is not None:
        raise Failed(fault)
    return "equals products of tiles" + (" (training's choice)" if kernel.name == chosen else ""), {}


def backend(settings: Settings, name: str) -> Iterator[Check]:
    """One backend: attention alone, then whole heads."""
    device = torch.device(settings.device)
    shapes = {"SmolLM2": SHAPES["SmolLM2"]} if settings.tiny else SHAPES
    for dtype in DTYPES:
        if (lacking := missing(name, device, dtype)) is not None:
            yield f"all, {_short(dtype)}", partial(skip, lacking[0])
            continue
        for target, (dim, shared_by) in shapes.items():
            for window in (None, 50):
                text = f"attention, {_short(dtype)}, {target}" + (f", window {window}" if window else "")
                yield text, partial(_attention, name, device, dtype, dim, shared_by, window)
        for layout in LAYOUTS:
            text = f"engine, {_short(dtype)}, {layout}"
            yield text, partial(_engine, name, device, dtype, layout, settings.tiny)


def need(name: str, device: torch.device, dtype: torch.dtype, head: DrafterHead) -> None:
    """Skips where the package or the device is missing; a backend that fails its proof is a failure."""
    try:
        choose_backend(name, device, dtype, head)
    except PeagleError as error:
        if "compared with the rule" in str(error):
            raise Failed(str(error)) from error
        raise Skip(str(error)) from error


def _attention(
    name: str, device: torch.device, dtype: torch.dtype, dim: int, shared_by: int, window: int | None
) -> tuple[str, dict[str, Any]]:
    fault = fault_of(backend_for(name), device, dtype, head_dim=dim, shared_by=shared_by, windows=[window])
    if fault is not None:
        raise Failed(fault)
    return f"values and gradients equal the rule to {TOLERANCE[dtype]:.0e}", {}


def _engine(
    name: str, device: torch.device, dtype: torch.dtype, layout: str, tiny: bool
) -> tuple[str, dict[str, Any]]:
    head, output, batch = example(device, LAYOUTS[layout], tiny)
    need(name, device, dtype, head)
    exact = _gradients(head, output, batch, "reference", torch.float32)
    error = _distance(_gradients(head, output, batch, name, dtype), exact)
    allowed = FLOAT32_ERROR
    if dtype != torch.float32:
        allowed = BFLOAT16_ERROR * _distance(_gradients(head, output, batch, "reference", dtype), exact)
    text = f"gradients differ by {error:.1e}, allowed are {allowed:.1e}"
    if not error <= allowed:
        raise Failed(text)
    return text, {"error": error, "allowed": allowed}


def example(
    device: torch.device, changes: dict[str, Any], tiny: bool
) -> tuple[DrafterHead, nn.Module, PackedBatch]:
    """A small random head, the output of a target, and three packed documents."""
    torch.manual_seed(0)
    config = replace(CONFIG, **changes)
    head = DrafterHead(config).to(device)
    output = nn.Linear(config.target_hidden_size, config.draft_vocab_size, bias=False).to(device)
    lengths = (70, 12, 40) if tiny else (700, 90, 260)
    return head, output, pack([document(config, n, n, POSITIONS) for n in lengths]).to(device)


def document(config: HeadConfig, length: int, seed: int, positions: int) -> Document:
    """Random tokens and states; the first quarter is the prompt."""
    generator = torch.Generator().manual_seed(seed)
    kept = sample_depths(
        trainable_depths(torch.arange(length) >= length // 4), positions, COD_RATE, generator=generator
    )
    return Document(
        torch.randint(4, config.vocab_size, (length,), generator=generator),
        torch.randn(length - 1, config.aux_width, generator=generator).bfloat16(),
        torch.randn(length - 1, config.target_hidden_size, generator=generator).bfloat16(),
        kept,
    )


def _gradients(
    head: DrafterHead, output: Callable[[Tensor], Tensor], batch: PackedBatch, name: str, dtype: torch.dtype
) -> Tensor:
    """All gradients side by side, [parameters] float32, with the loss in front."""
    half = dtype != torch.float32
    with torch.autocast(batch.positions.device.type, dtype if half else torch.bfloat16, enabled=half):
        sums, gradients = loss_and_gradients(
            head,
            lambda last: output(last.float()),
            batch,
            kind="kl",
            weights=torch.ones(POSITIONS),
            settings=EngineSettings(256, 128, name),
        )
    return torch.cat([sums.loss.detach().view(1), *(g.flatten() for g in gradients if g is not None)])


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """The larger of the relative errors of the loss and of the gradients."""
    if ours.shape != theirs.shape:
        raise Failed(f"{len(ours)} gradients, expected {len(theirs)}")
    loss = (ours[0] - theirs[0]).abs() / theirs[0].abs()
    gradients = (ours[1:] - theirs[1:]).norm() / theirs[1:].norm()
    return float(torch.maximum(loss, gradients))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


NAMES = tuple(BACKENDS)
