"""The export stage: from the best checkpoint to a proven head, once, with the command that serves it."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pytest
import torch
from rich.console import Console

from peagle_train.errors import CorruptError
from peagle_train.export.checks import HeadFault, check_head
from peagle_train.export.layout import read_head
from peagle_train.export.stage import export, serve_command, target_reference
from peagle_train.head.io import save_head
from peagle_train.recipe import load_recipe
from peagle_train.run import Run
from peagle_train.stages import begin, seal
from tests.export.conftest import FACTS, small_head

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "smollm2.yaml"


def trained_run(tmp_path: Path, *overrides: str, head=None) -> Run:
    """A run whose training has just finished with a small head."""
    settings = (f"output={tmp_path}", "target.model=owner/target", *overrides)
    run = Run(load_recipe(RECIPE, settings), str(RECIPE), settings, ("peagle",), FACTS)
    if not run.training_dir.exists():
        begin(run.training_dir, {"stage": "train"})
        (run.training_dir / "best").mkdir()
        save_head(run.training_dir / "best", head or small_head())
        seal(run.training_dir, {"stage": "train"}, 1.0)
    return run


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_the_best_checkpoint_becomes_a_proven_head(tmp_path: Path) -> None:
    run, console = trained_run(tmp_path, "export.dtype=float32"), quiet()
    result = export(run, console)
    assert not result.skipped
    assert check_head(run.head_dir, FACTS).config == small_head().config
    state = read_head(run.head_dir).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in small_head().state_dict().items())
    provenance = json.loads((run.head_dir / "export.json").read_text())["provenance"]
    assert (provenance["run"], provenance["seed"], provenance["k"]) == ("smollm2", 0, 5)
    printed = console.file.getvalue()
    assert "40 of 96 tokens" in printed
    assert serve_command(run.head_dir, "owner/target", 5) in printed


def test_the_same_export_is_skipped_and_another_is_not(tmp_path: Path) -> None:
    export(trained_run(tmp_path), quiet())
    assert export(trained_run(tmp_path, "evaluate.k=3"), quiet()).skipped  # a plain head holds no K
    other = trained_run(tmp_path, "export.format=speculators")
    assert not export(other, quiet()).skipped
    assert check_head(other.head_dir).format == "speculators"
    assert len(list(other.directory.glob("head.old-*"))) == 1  # nothing is ever deleted


def test_a_speculators_head_carries_k(tmp_path: Path) -> None:
    export(trained_run(tmp_path, "export.format=speculators"), quiet())
    run = trained_run(tmp_path, "export.format=speculators", "evaluate.k=3")
    assert not export(run, quiet()).skipped
    config = json.loads((run.head_dir / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/target"


def test_a_head_with_nan_leaves_no_directory(tmp_path: Path) -> None:
    head = small_head()
    with torch.no_grad():
        head.norm.weight[0] = float("nan")
    run = trained_run(tmp_path, head=head)
    with pytest.raises(HeadFault, match=r"norm.weight: 1 of 32 values are NaN"):
        export(run, quiet())
    assert not run.head_dir.exists()


def test_training_without_a_best_head_is_named(tmp_path: Path) -> None:
    run = trained_run(tmp_path)
    (run.training_dir / "best" / "head.json").unlink()
    with pytest.raises(CorruptError, match=r"best/head\.json: missing.*run `peagle train"):
        export(run, quiet())


def test_the_serve_commands() -> None:
    words = shlex.split(serve_command("runs/a b/head", "owner/target", 7))
    assert words[:4] == ["vllm", "serve", "owner/target", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "eagle3",
        "model": "runs/a b/head",
        "num_speculative_tokens": 7,
        "parallel_drafting": True,
    }
    sequential = shlex.split(serve_command("runs/head", "owner/target", 7, method="eagle3"))
    assert json.loads(sequential[4])["parallel_drafting"] is False
    assert shlex.split(serve_command("runs/a/head", "owner/target", 7, "speculators")) == [
        "vllm",
        "serve",
        "runs/a/head",
    ]


def test_a_local_target_is_named_by_its_absolute_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / "target"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    monkeypatch.chdir(tmp_path)
    assert target_reference(trained_run(tmp_path, "target.model=models/target"), quiet()) == str(folder)
    assert target_reference(trained_run(tmp_path), quiet()) == "owner/target"
