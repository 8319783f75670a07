"""Backends by name: each equals the rule, and none is used that was not proven where it runs.

No GPU is needed: flash-attn is a stand-in with the package's functions in plain torch, so what is proven is
everything around them (boundaries of documents, windows, layout of the log-sum-exp, order of arguments),
not the package; flex_attention runs its forward on the CPU, and forward and backward through a stand-in for
the compiled function that skips blocks as the kernel does. `make gpu-check` holds the real ones against the
reference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from peagle_train.errors import PeagleError
from peagle_train.head import choose, flash, flex, prefix
from peagle_train.head.backends import Backend, Flash, Flex, Sdpa
from peagle_train.head.choose import choose_backend, fault_of
from peagle_train.head.config import FULL, SLIDING
from peagle_train.head.engine import EngineSettings
from peagle_train.head.kernels import fault_of as kernel_fault
from tests.head.test_engine import LONG
from tests.head.test_exactness import assert_same, fast_loss
from tests.head.toys import EAGLE3, toy_document, toy_head

CPU = torch.device("cpu")


class FlashStandIn(ModuleType):
    """flash_attn.flash_attn_interface of flash-attn 2.8, dense and packed, by its own rules."""

    def __init__(self) -> None:
        super().__init__("flash_attn.flash_attn_interface")
        self.calls: list[tuple[list[int], tuple[int, int]]] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,  # [total, heads, D]
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        starts = cu_seqlens_q.tolist()
        self.calls.append((starts, window_size))
        assert starts == cu_seqlens_k.tolist() and starts[-1] == len(q) == len(k) == len(v)
        lengths = cu_seqlens_q.diff()
        assert causal and max_seqlen_q == max_seqlen_k == int(lengths.max()) and int(lengths.min()) > 0
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        row = torch.arange(len(q))
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        back = row[:, None] - row
        left, right = window_size
        seen = (document[:, None] == document) & (back >= 0)
        seen &= (left < 0) | (back <= left)
        seen &= (right < 0) | (-back <= right)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)

    def _flash_attn_forward(
        self,
        q: Tensor,  # [batch, slots, heads, D]
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert (dropout_p, causal, window_size_left, window_size_right, softcap) == (0.0, False, -1, -1, 0.0)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
        return out, scores.logsumexp(-1), torch.empty(0), torch.empty(2)

    def _flash_attn_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        assert (
            dq.is_contiguous() and dk.is_contiguous() and dv.is_contiguous() and softmax_lse.is_contiguous()
        )
        weights = (torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale - softmax_lse[..., None]).exp()
        delta = (dout * out).sum(-1).transpose(1, 2)  # [batch, heads, slots]
        slope = weights * (torch.einsum("bihd,bjhd->bhij", dout, v) - delta[..., None]) * softmax_scale
        dv.copy_(torch.einsum("bhij,bihd->bjhd", weights, dout))
        dq.copy_(torch.einsum("bhij,bjhd->bihd", slope, k))
        dk.copy_(torch.einsum("bhij,bihd->bjhd", slope, q))
        return delta


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FlashStandIn:
    """flash-attn, as far as an import can tell."""
    stand_in = FlashStandIn()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", stand_in)
    flash._boundaries.cache_clear()
    return stand_in


def by_blocks(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    """flex_attention as the kernel does it: blocks not listed are skipped, whole ones have no mask."""
    assert q.shape[-2] % flex.BLOCK == k.shape[-2] % flex.BLOCK == 0 and enable_gqa
    rows, keys = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    sees = block_mask.mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], keys)
    seen = torch.zeros_like(sees)
    listed = [(block_mask.kv_num_blocks, block_mask.kv_indices, False)]
    listed.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, True))
    for counts, indices, whole in listed:
        for r, count in enumerate(counts[0, 0].tolist()):
            mine = slice(r * flex.BLOCK, (r + 1) * flex.BLOCK)
            for c in indices[0, 0, r, :count].tolist():
                theirs = slice(c * flex.BLOCK, (c + 1) * flex.BLOCK)
                seen[mine, theirs] = True if whole else sees[mine, theirs]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


@pytest.fixture(params=["flash", "flex"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Each of the two over its stand-in."""
    monkeypatch.setattr(flex, "compiled", lambda: by_blocks)
    request.getfixturevalue("package")
    yield Flash() if request.param == "flash" else Flex()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("window", [None, 1, 20, 150])
def test_a_backend_equals_the_rule(backend: Backend, window: int | None, dtype: torch.dtype) -> None:
    assert fault_of(backend, CPU, dtype, head_dim=8, shared_by=3, windows=[window]) is None


@pytest.mark.parametrize("dtype", choose.TOLERANCE)
@pytest.mark.parametrize("window", [None, 1, 20])
def test_torchs_own_attention_equals_the_rule(window: int | None, dtype: torch.dtype) -> None:
    assert fault_of(Sdpa(), CPU, dtype, head_dim=8, shared_by=2, windows=[window]) is None


@pytest.mark.parametrize("windows", [None, 5])
def test_loss_and_gradients_through_the_engine(
    backend: Backend, windows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prefix.WIDTH, "cpu", 8)
    layers: dict[str, Any] = dict(num_layers=3)
    if windows is not None:
        layers |= dict(layer_types=(SLIDING, FULL, SLIDING), sliding_window=windows)
    head, documents = toy_head(**layers), [toy_document(**d) for d in LONG]  # type: ignore[arg-type]
    ours, _ = fast_loss(head, documents, settings=EngineSettings(9, 11, backend.name), pad=110)
    theirs, _ = fast_loss(head, documents, settings=EngineSettings(9, 11, "reference"))
    assert_same(head, ours, theirs, 1e-10)


def test_flash_sees_documents_and_windows(package: FlashStandIn) -> None:
    q, k = torch.randn(12, 4, 8), torch.randn(12, 2, 8)
    out = Flash().real_slots(q, k, k, ((0, 4), (4, 4), (4, 10)), 3)
    assert package.calls == [([0, 4, 10], (2, 0))]
    assert torch.equal(out[10:], k[10:].repeat_interleave(2, 1))


def test_flashs_kernel_is_proven_like_the_others(
    package: FlashStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernel_fault(flash.FlashAttn(), CPU, torch.float32, 16) is None
    forward = package._flash_attn_forward
    monkeypatch.setattr(
        package, "_flash_attn_forward", lambda *a, **b: (forward(*a, **b)[0], forward(*a, **b)[1] / 2)
    )
    assert "lse differs" in str(kernel_fault(flash.FlashAttn(), CPU, torch.float32, 16))
    assert "differs" in str(fault_of(Flash(), CPU, torch.float32, head_dim=16, shared_by=2, windows=[None]))


def _one_block_short(patch: pytest.MonkeyPatch) -> None:
    listed = flex._listed
    patch.setattr(flex, "_listed", lambda blocks: ((t := listed(blocks))[0].sub(1).clamp(min=1), t[1]))


def _whole_where_partial(patch: pytest.MonkeyPatch) -> None:
    original = BlockMask.from_kv_blocks
    patch.setattr(BlockMask, "from_kv_blocks", lambda a, b, c, d, **rest: original(c, d, a, b, **rest))


def _chain_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    plan = flex._plan
    patch.setattr(flex, "_plan", lambda a, b, n, slots: plan(a, b, None if n is None else n + 1, slots))


@pytest.mark.parametrize("plant", [_one_block_short, _whole_where_partial, _chain_of_the_neighbour])
def test_the_proof_notices(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "compiled", lambda: by_blocks)
    plant(monkeypatch)
    assert "differs" in str(fault_of(Flex(), CPU, torch.float64, head_dim=8, shared_by=2, windows=[None]))


def test_a_backend_that_fails_is_a_fault() -> None:
    class Broken(Sdpa):
        def real_slots(self, *given: Any) -> Tensor:
            raise RuntimeError("no kernel image\nand a long trace")

    found = fault_of(Broken(), CPU, torch.float32, head_dim=8, shared_by=1, windows=[3])
    assert found == "window 3: RuntimeError: no kernel image"


def test_buckets() -> None:
    sizes = sorted({flex.bucket(n) for n in range(0, 5000)})
    assert sizes == [128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]
    assert all(n <= flex.bucket(n) < max(2 * n, 129) for n in range(1, 5000))


def test_new_lengths_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex's forward on the CPU, compiled: once per pair of buckets, whatever the lengths and the layouts."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(flex_attention, dynamic=False, backend=counter)
    monkeypatch.setattr(flex, "compiled", lambda: function)
    generator = torch.Generator().manual_seed(0)

    def run(lengths: tuple[int, ...], window: int | None) -> None:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        spans = tuple(zip([0, *ends], ends, strict=False))
        q, k, v = (torch.randn(ends[-1], heads, 16, generator=generator) for heads in (4, 2, 2))
        with torch.no_grad():
            ours = Flex().real_slots(q, k, v, spans, window)
        assert torch.allclose(ours, Sdpa().real_slots(q, k, v, spans, window), atol=1e-5)

    run((140, 60), None)
    assert counter.frame_count == 1
    for lengths, window in [((100, 101), None), ((256,), None), ((90, 3, 60), 7), ((129,), 1)]:
        run(lengths, window)
    assert counter.frame_count == 1
    run((150, 120), None)  # the next bucket
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    "compiler",
    # slow: three kernels in C++
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_flex_compiled_on_the_cpu_equals_the_rule_with_own_chains(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of all three ways of calling it; flex_attention has no backward on a CPU."""
    torch._dynamo.reset()
    function = torch.compile(flex_attention, dynamic=False, backend=compiler)
    monkeypatch.setattr(flex, "compiled", lambda: function)
    seen: list[Tensor] = []

    def values_alone(attention: Any, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
        with torch.no_grad():
            seen.append(attention(*inputs))
        return [seen[-1]] * 4

    monkeypatch.setattr(choose, "_with_gradients", values_alone)
    assert fault_of(Flex(), CPU, torch.float32, head_dim=16, shared_by=2, windows=[None, 20]) is None
    assert len(seen) == 4


def test_layers_share_a_plan() -> None:
    plans = flex.Plans()
    q, spans = torch.zeros(20, 2, 8), ((0, 12), (12, 20))
    plan = plans.of_documents(spans, None, q)
    assert plans.of_documents(spans, None, q) is plan
    assert plans.of_documents(spans, 4, q) is not plan
    for window in range(1, flex.KEPT + 1):
        plans.of_documents(spans, window, q)
    assert plans.of_documents(spans, None, q) is not plan  # let go: memory stays bounded


HEAD = toy_head()


@pytest.mark.parametrize(
    ("name", "device", "dtype", "says"),
    [
        (
            "flash",
            "cpu",
            torch.bfloat16,
            "flash-attn runs on NVIDIA GPUs, and this is a cpu. Set train.backend",
        ),
        ("flash", "cuda", torch.float32, "flash-attn has no float32. Set train.precision: bf16, or"),
        ("flash", "cuda", torch.bfloat16, "`pip install flash-attn`"),
        ("flex", "cpu", torch.float32, "flex_attention has no backward on CPU"),
        ("fancy", "cpu", torch.float32, "expected one of auto, reference, sdpa, flash, flex"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_the_cure(
    name: str, device: str, dtype: torch.dtype, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "PACKAGE", "flash_attn_that_is_not_there")
    with pytest.raises(PeagleError) as raised:
        choose_backend(name, torch.device(device), dtype, HEAD)
    assert says in str(raised.value) and name in str(raised.value)


@pytest.mark.parametrize("name", ["flash", "flex"])
def test_eagle3_has_torchs_attention_alone(name: str) -> None:
    with pytest.raises(PeagleError, match="eagle3"):
        choose_backend(name, torch.device("cuda"), torch.bfloat16, toy_head(**EAGLE3))
    assert choose_backend("auto", CPU, torch.bfloat16, toy_head(**EAGLE3))[0] == "sdpa"


def test_auto_takes_what_is_proven_and_says_what_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    name, reason = choose_backend("auto", CPU, torch.float32, HEAD)
    assert name == "sdpa"
    assert reason == (
        "sdpa, tested on cpu in float32, prefixes by fused-cpu; not flash: flash-attn runs on NVIDIA GPUs, "
        "and this is a cpu"
    )
    cuda = torch.device("cuda")
    monkeypatch.setattr(choose, "missing", lambda name, device, dtype: None)
    proofs: dict[str, str | None] = {"flash": "dk differs by 3.0e-01", "sdpa": None}
    monkeypatch.setattr(choose, "fault_of", lambda backend, *given, **sizes: proofs[backend.name])
    monkeypatch.setattr(choose, "_describe", lambda name, *given: name)
    name, reason = choose_backend("auto", cuda, torch.bfloat16, HEAD)
    assert (name, reason) == (
        "sdpa",
        "sdpa; not flash: compared with the rule on cuda, dk differs by 3.0e-01",
    )
    with pytest.raises(PeagleError, match=r"dk differs by 3.0e-01. Set train.backend: sdpa"):
        choose_backend("flash", cuda, torch.bfloat16, HEAD)
    proofs["flash"] = None
    assert choose_backend("auto", cuda, torch.bfloat16, HEAD) == ("flash", "flash")
    proofs |= {"flash": "no", "sdpa": "dq differs"}
    with pytest.raises(PeagleError, match="gpu-check"):
        choose_backend("auto", cuda, torch.bfloat16, HEAD)


def test_named_ones_that_run_are_described() -> None:
    assert choose_backend("sdpa", CPU, torch.float64, HEAD)[0] == "sdpa"
    assert "square" in choose_backend("reference", CPU, torch.float32, HEAD)[1]
