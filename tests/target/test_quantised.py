"""Quantised targets: the numbers they stand for on a CPU, kernels or a clear refusal on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data_prep.teacher_forcing import forced_states
from peagle_train.errors import PeagleError
from peagle_train.head.initialise import COPIED
from peagle_train.recipe.schema import TargetSection
from peagle_train.target.adapter import Target
from peagle_train.target.loading import load_model
from peagle_train.target.parts import load_parts
from peagle_train.target.quantised import settle
from peagle_train.target.source import describe
from peagle_train.twin.models import TWINS
from tests.target.quantise import quantised, set_quantisation

GPU = torch.device("cuda:0")
CASES = {"gpt_oss": "mxfp4", "qwen3_moe": "fp8", "llama": "fp8"}
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A quantised twin, and one of the same numbers."""
    made: dict[str, Pair] = {}

    def get(kind: str) -> Pair:
        if kind not in made:
            made[kind] = quantised(TWINS[kind](tmp_path_factory.mktemp(kind) / "twin"), CASES[kind])
        return made[kind]

    return get


@contextmanager
def a_machine_with_a_gpu(
    free: float = 1e12, capability: tuple[int, int] = (9, 0), kernels: bool = True
) -> Iterator[None]:
    """As transformers and `quantised` see one; nothing can run on it."""
    packages = "transformers.utils.import_utils.is_{}_available"
    with (
        patch("torch.cuda.is_available", return_value=True),
        patch("torch.cuda.device_count", return_value=2),
        patch("torch.cuda.get_device_capability", return_value=capability),
        patch("torch.cuda.mem_get_info", return_value=(int(free), int(2 * free))),
        patch(packages.format("kernels"), return_value=kernels),
        patch(packages.format("triton"), return_value=True),
    ):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CASES)
def test_states_are_those_of_the_numbers_that_are_meant(
    pair: Callable[[str], Pair], kind: str, dtype: torch.dtype
) -> None:
    rows = [[5, 9, 40, 8, 77] * 5, [33, 6, 50]]
    states = []
    for folder in pair(kind):
        target = Target.load(folder, dtype=dtype, device="cpu")
        assert target.dtype == dtype
        states.append(forced_states(target, rows, range(5), dtype))
    for ours, theirs in zip(*states, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("kind", CASES)
def test_a_cpu_beside_a_gpu_is_a_cpu(pair: Callable[[str], Pair], kind: str) -> None:
    """transformers would keep the weights for kernels of the GPU, and fail in the first pass."""
    stored, widened = pair(kind)
    with a_machine_with_a_gpu():
        ours = Target.load(stored, dtype="float32", device="cpu")
        parts = load_parts(stored, dtype="float32", layers=1, wanted=COPIED)
    theirs = Target.load(widened, dtype="float32", device="cpu")
    ids = torch.tensor([[5, 9, 40, 8]])
    assert torch.equal(*(t.forward(ids, aux_layers=[]).last for t in (ours, theirs)))
    (layer,), (own,) = parts.last_layers(1), theirs.last_layers(1)
    assert torch.equal(layer["self_attn.q_proj.weight"], own["self_attn.q_proj.weight"])
    assert torch.equal(parts.head_table(), theirs.head_table())


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_on_a_gpu_kernels_decide_and_memory_where_they_are_missing(
    pair: Callable[[str], Pair], kind: str
) -> None:
    folder, method = pair(kind)[0], CASES[kind]
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    whole = 2 * sum(parameter.numel() for parameter in model.parameters())  # bytes in bfloat16
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def settled(spread: bool = False, **machine: Any) -> tuple[str | None, bool]:
        config = AutoConfig.from_pretrained(folder)
        with a_machine_with_a_gpu(**machine):
            kept = settle(config, folder, "x", dtype=torch.bfloat16, device=GPU, spread=spread)
        return kept, config.quantization_config.get("dequantize", False)

    assert settled(free=1.2 * stored) == (method, False)
    assert settled(free=1.2 * whole, kernels=False) == (None, True)
    assert settled(free=1.2 * whole, capability=(7, 0)) == (None, True)
    scarce = 0.9 * whole
    cures = (
        rf"once widened from {method}, and the GPU has .* keep them in {method}, which needs "
        r"`pip install 'kernels>=.*target\.parallel: layers, or take a larger GPU"
    )
    with pytest.raises(PeagleError, match=cures):
        settled(free=scarce, kernels=False)
    with pytest.raises(PeagleError, match=r"needs a GPU of compute capability .*, this one has 7\.0"):
        settled(free=scarce, capability=(7, 0))
    assert settled(free=scarce, kernels=False, spread=True)[1], "two GPUs hold what one does not"
    with pytest.raises(PeagleError, match=r"these GPUs have .* take more or larger GPUs"):
        settled(free=0.3 * whole, kernels=False, spread=True)


def test_a_plain_target_larger_than_the_gpu_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = TWINS["llama"](tmp_path / "twin")
    config = AutoConfig.from_pretrained(folder)
    with a_machine_with_a_gpu(free=1000), pytest.raises(PeagleError) as caught:
        settle(config, folder, "mine", dtype=torch.bfloat16, device=GPU, spread=False)
    assert "target mine: its weights take 0.0 GB, and the GPU has" in str(caught.value)
    assert "quantis" not in str(caught.value) and "target.parallel: layers" in str(caught.value)


def test_kernels_that_do_not_come_are_one_error_with_its_cure(pair: Callable[[str], Pair]) -> None:
    folder = pair("gpt_oss")[0]
    config, facts = AutoConfig.from_pretrained(folder), describe(TargetSection(model=str(folder)))
    with (
        a_machine_with_a_gpu(),
        patch.object(AutoModelForCausalLM, "from_pretrained", side_effect=OSError("no network")),
        pytest.raises(
            PeagleError, match=r"mxfp4 weights cannot be run here \(no network\).*kernels-community"
        ),
    ):
        load_model(
            folder,
            config,
            facts,
            dtype=torch.bfloat16,
            device=GPU,
            trust_remote_code=False,
            spread=False,
        )


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors", "bitsandbytes", "of my own"])
def test_another_quantisation_is_refused_by_its_name(tmp_path: Path, method: str) -> None:
    folder = TWINS["llama"](tmp_path / "twin")
    set_quantisation(folder, {"quant_method": method, "bits": 4})
    for ask in (
        lambda: Target.load(folder, dtype="float32", device="cpu"),
        lambda: describe(TargetSection(model=str(folder))),
    ):
        with pytest.raises(PeagleError, match=f"quantised by {method}; expected mxfp4 or fp8, or none"):
            ask()


def test_scales_without_a_word_in_the_config_are_no_weights(tmp_path: Path) -> None:
    """What transformers would read as plain numbers, without their scales."""
    folder = quantised(TWINS["llama"](tmp_path / "twin"), "fp8")[0]
    set_quantisation(folder, {})
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"quantization_config": {}', '"comment": 0'))
    with pytest.raises(PeagleError, match=r"no use for 28 tensors.*weight_scale_inv"):
        Target.load(folder, dtype="float32", device="cpu")
