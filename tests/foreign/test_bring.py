"""`peagle import`: what appears is a head of ours, proven, recorded, and told how to go on with."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.export.checks import HeadFault, check_head
from peagle_train.export.layout import export_head, read_head
from peagle_train.files import read_json, sha256_of
from peagle_train.foreign import bring as bring_module
from peagle_train.foreign.bring import import_head
from peagle_train.head.rope import Rope
from peagle_train.recipe.schema import TargetSection
from peagle_train.target.facts import KVLayer, TargetFacts
from peagle_train.target.kv_groups import FLAG
from peagle_train.target.source import describe
from tests.export.conftest import FACTS, small_head
from tests.foreign import publish

SERVED = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": FACTS.num_layers,
    "hidden_size": FACTS.hidden_size,
    "intermediate_size": FACTS.intermediate_size,
    "num_attention_heads": FACTS.num_attention_heads,
    "num_key_value_heads": FACTS.num_key_value_heads,
    "vocab_size": FACTS.vocab_size,
    "max_position_embeddings": FACTS.max_position_embeddings,
    "rms_norm_eps": FACTS.rms_norm_eps,
    "rope_theta": FACTS.rope_theta,
}


@pytest.fixture(autouse=True)
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TargetFacts:
    """A folder `target` with the config of FACTS: of a target, an import reads nothing else."""
    monkeypatch.chdir(tmp_path)
    Path("target").mkdir()
    Path("target/config.json").write_text(json.dumps(SERVED))
    Path("target/model.safetensors").write_text("")
    return describe(TargetSection(model="target"))


def bring(source: Path | str, out: str, **given: Any) -> str:
    """Imports, and returns what was printed."""
    console = Console(file=io.StringIO(), width=200)
    import_head(str(source), Path(out), target="target", console=console, **given)
    return console.file.getvalue()  # type: ignore[attr-defined]


def same(directory: str, other: str) -> None:
    """Two heads of ours hold the same head, bit for bit."""
    left, right = check_head(directory), check_head(other)
    assert left.config == right.config and left.weights_sha256 == right.weights_sha256


def test_a_published_head_becomes_one_of_ours(target: TargetFacts) -> None:
    head = small_head(draft_vocab_size=96)
    theirs = publish.amazon(head, Path("theirs"))
    printed = bring(theirs, "ours")
    report = check_head("ours", target)
    assert (report.config, report.dtype, report.format) == (head.config, "bfloat16", "plain")
    assert torch.equal(read_head(Path("ours")).fc.weight, head.fc.weight.bfloat16())
    record = read_json(Path("ours/export.json"))["provenance"]["imported"]
    assert (record["source"], record["format"]) == ("theirs", "plain")
    assert record["sha256"]["model.safetensors"] == sha256_of(theirs / "model.safetensors")
    assert any(change["found"] == "midlayer.*" for change in record["changes"])
    assert "recommends no number of tokens" in printed
    for part in (
        "midlayer.*",
        "96 zeros",
        "vllm serve",
        "peagle evaluate RECIPE --head ours",
        "start_from: ours",
    ):
        assert part in printed, part


def test_plain_to_speculators_and_back(target: TargetFacts) -> None:
    bring(publish.amazon(small_head(), Path("theirs")), "plain")
    with pytest.raises(PeagleError, match=r"found no number of tokens to draft.*--k 5"):
        bring("plain", "speculators", format="speculators")
    assert not Path("speculators").exists()
    bring("plain", "speculators", format="speculators", k=7)
    config = read_json(Path("speculators/config.json"))["speculators_config"]
    assert config["proposal_methods"][0]["speculative_tokens"] == 7
    assert config["verifier"]["name_or_path"] == str(Path("target").resolve())
    bring("speculators", "again")
    same("plain", "again")
    bring("again", "third", format="speculators")  # K came along in the record
    assert read_json(Path("third/config.json")) == read_json(Path("speculators/config.json"))


def test_speculators_to_plain_keeps_k(target: TargetFacts) -> None:
    printed = bring(publish.speculators(small_head(own=False), Path("theirs")), "ours")
    assert '"num_speculative_tokens": 6' in printed and '"parallel_drafting": true' in printed
    assert read_json(Path("ours/export.json"))["provenance"]["k"] == 6


def test_what_a_strangers_file_says_is_shown_as_it_is(target: TargetFacts) -> None:
    theirs = publish.speculators(small_head(), Path("theirs"))
    name = {"name_or_path": "[/bold]"}  # as markup it would stop the program
    publish.edit(theirs, lambda config: config["speculators_config"]["verifier"].update(name))
    assert "[/bold]" in bring(theirs, "ours")


def test_a_head_of_ours_keeps_its_provenance(target: TargetFacts) -> None:
    export_head(small_head(), Path("made"), target=target, dtype="float32", extra={"run": "r", "k": 4})
    printed = bring("made", "copy", format="speculators")
    assert "nothing had to be put into other words" in printed
    same("made", "copy")
    record = read_json(Path("copy/export.json"))["provenance"]
    assert (record["run"], record["k"], record["imported"]["source"]) == ("r", 4, "made")
    with pytest.raises(HeadFault, match=r"--aux-layers: \[1, 2\]; expected \[1, 2, 4\]"):
        bring("made", "other", aux_layers=[1, 2])


@pytest.mark.parametrize("publisher", [publish.eagle3, publish.speculators])
def test_an_eagle3_head_is_served_one_token_after_the_other(target: TargetFacts, publisher: Any) -> None:
    head = small_head(
        method="eagle3",
        mask_token_id=None,
        layers=1,
        rope=Rope(10000.0),
        aux_layers=(1, 2, 3),
        norm_before_residual=publisher is publish.speculators,
    )
    printed = bring(publisher(head, Path("theirs")), "ours", aux_layers=[1, 2, 3], k=3)
    assert check_head("ours").config == head.config
    assert '"parallel_drafting": false' in printed
    assert "\nmethod: eagle3\nhead:\n" in printed and "mask_token" not in printed


def test_the_printed_section_describes_the_head(target: TargetFacts) -> None:
    """Pasted into a recipe it gives a head of exactly this config, whatever its options are."""
    from types import SimpleNamespace

    from peagle_train.recipe.head import head_config
    from peagle_train.recipe.schema import HeadSection

    shapes: list[dict[str, Any]] = [
        {},
        {"own": False, "draft_vocab_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024},
        {"drafter": "qwen3", "fc_norm": True, "norm_before_fc": True, "norm_before_residual": True},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9, "attention_bias": True},
        {"rope": Rope(5e5, "yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=16.0)},
        {"rope": Rope(9e4), "hidden_size": 16, "num_key_value_heads": 1, "head_dim": 6},
        {"method": "eagle3", "mask_token_id": None, "layers": 1, "norm_output": True},
    ]
    for number, shape in enumerate(shapes):
        head = small_head(**shape)
        export_head(head, Path(f"made{number}"), target=target, dtype="float32")
        printed = bring(f"made{number}", f"copy{number}")
        text = printed[printed.index("in a recipe:\n") + 12 : printed.index("Measure it")]
        pasted = yaml.safe_load(text)
        section = HeadSection(**pasted["head"])
        recipe: Any = SimpleNamespace(head=section, method=pasted.get("method", "peagle"))
        assert section.mask_token is None or isinstance(section.mask_token, int)
        size = section.draft_vocab_size or target.vocab_size
        assert head_config(recipe, target, section.mask_token, size) == head.config, shape
        assert section.start_from == f"copy{number}"
        assert (FLAG in printed) == (head.config.sliding_window is not None)  # two kinds of KV cache


def test_windows_that_vllm_cannot_serve_together_are_refused(
    target: TargetFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = small_head(layer_types=("sliding_attention", "full_attention"), sliding_window=9)
    export_head(head, Path("made"), target=target)
    kinds = (KVLayer(7, 2, 8), KVLayer(None, 2, 8)) * 2
    monkeypatch.setattr(bring_module, "describe", lambda section: replace(target, kv_layers=kinds))
    with pytest.raises(HeadFault, match=r"config\.json: sliding_window: windows of 7 and 9"):
        bring("made", "ours")
    assert not Path("ours").exists()


def test_a_refused_head_leaves_nothing(target: TargetFacts) -> None:
    theirs = publish.amazon(small_head(), Path("theirs"))
    publish.edit(theirs, publish.put(vocab_size=95))
    with pytest.raises(HeadFault, match="is this the head's own target"):
        bring(theirs, "ours")
    assert not Path("ours").exists()


def test_what_stands_at_the_place_is_not_touched(target: TargetFacts) -> None:
    theirs = publish.amazon(small_head(), Path("theirs"))
    with pytest.raises(PeagleError, match="theirs: found something there"):
        bring(theirs, "theirs")


@pytest.mark.parametrize("source", ["nowhere", "./no/where", "a/b/c"])
def test_a_head_that_is_nowhere(target: TargetFacts, source: str) -> None:
    with pytest.raises(
        PeagleError, match=r"found no such folder; expected the folder of a head, .* or a Hub id"
    ):
        bring(source, "ours")


def test_a_file_where_a_folder_belongs(target: TargetFacts) -> None:
    theirs = publish.amazon(small_head(), Path("theirs"))
    size = (theirs / "config.json").stat().st_size
    with pytest.raises(
        PeagleError, match=f"found a file of {size:,} bytes; expected .*give its folder: theirs"
    ):
        bring("theirs/config.json", "ours")
    Path("link").symlink_to("gone")
    with pytest.raises(PeagleError, match="link: found a link that leads nowhere"):
        bring("link", "ours")


def test_a_hub_id_that_cannot_be_fetched_says_so(target: TargetFacts) -> None:
    with pytest.raises(
        PeagleError, match="owner/head: found no such folder here, and it cannot be read as a Hub id"
    ):
        bring("owner/head", "ours")  # HF_HUB_OFFLINE is set for all tests


def test_a_hub_id_is_fetched_without_pickles(target: TargetFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = publish.amazon(small_head(), Path("cache"))
    asked: dict[str, Any] = {}

    def fetch(source: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(source=source, revision=revision, patterns=allow_patterns)
        return str(theirs)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    bring("owner/head", "ours", revision="abc")
    assert asked == {"source": "owner/head", "revision": "abc", "patterns": ["*.json", "*.safetensors"]}
    assert read_json(Path("ours/export.json"))["provenance"]["imported"]["source"] == "owner/head"
