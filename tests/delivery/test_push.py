"""What holds for every destination: parsing, the card, secrets, the stage."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peagle_train import stages
from peagle_train.delivery import push_head
from peagle_train.delivery.manifest import FileEntry, Manifest, compare
from peagle_train.delivery.progress import printable, without_queries
from peagle_train.delivery.push import push
from peagle_train.errors import CorruptError, PeagleError, StaleError
from peagle_train.files import fingerprint, read_json, sha256_of, write_json
from peagle_train.stages import begin, seal
from tests.delivery.conftest import BUCKET, SECRETS, Shown, Store
from tests.delivery.hub_stub import HubStub

PLACE = f"s3://{BUCKET}/runs/mine"


@pytest.mark.parametrize(
    "place",
    ["", "mine", "/tmp/mine", "gs://bucket/mine", "S3://bucket/mine", "https://huggingface.co/me/mine"],
)
def test_other_schemes_are_refused_with_the_cure(place: str, tmp_path: Path, shown: Shown) -> None:
    with pytest.raises(PeagleError, match=r"expected s3://bucket/prefix or hf://owner/name"):
        push_head(tmp_path, place, shown.console)


@pytest.mark.parametrize(
    "place", ["s3://", "s3://heads", "s3://heads/", "s3://Heads/mine", "s3://heads/a/../b"]
)
def test_a_malformed_s3_place_is_refused(place: str, tmp_path: Path, shown: Shown) -> None:
    with pytest.raises(PeagleError, match=r"expected s3://bucket/prefix|prefix of its own"):
        push_head(tmp_path, place, shown.console)


def test_the_card_holds_what_was_measured_on_this_export(head: Path, s3: Store, shown: Shown) -> None:
    parts = {"stage": "export", "version": 1}
    seal(head, parts, 1.0)
    evaluation = head.parent / "evaluation"
    parts = {"stage": "evaluate", "export": fingerprint(parts)}
    begin(evaluation, parts)
    figures = {"acceptance_length": 2.3453, "per_position": [0.7, 0.645], "num_drafts": 1234}
    figures |= {"num_accepted": 1660, "prompts": 104}
    unused: dict[str, Any] = dict.fromkeys(figures, 0) | {"per_position": []}
    write_json(
        evaluation / "results.json", {"k": 2, "sets": {"stdlib": {"offline": figures, "loop": unused}}}
    )
    push_head(head, "s3://heads/runs/unfinished", shown.console)
    assert "Not measured" in s3.read("runs/unfinished/README.md").decode()

    seal(evaluation, parts, 1.0)
    push_head(head, PLACE, shown.console)
    card = s3.read("runs/mine/README.md").decode()
    row = next(line for line in card.splitlines() if line.startswith("| stdlib"))
    assert row == "| stdlib | offline | 104 | 2.35 | 0.70 0.65 | 1,234 | 1,660 |"
    assert "K = 2" in card and "| stdlib | loop" not in card
    assert "aws s3 cp --recursive s3://heads/runs/mine ./mine" in card
    assert "| aux layers | 1, 2, 4 |" in card and "| mask token id | 3 |" in card
    assert "| positions trained | 6 |" in card
    assert sha256_of(head / "model.safetensors") in card

    record = read_json(evaluation / "stage.json")
    write_json(evaluation / "stage.json", record | {"parts": {"stage": "evaluate", "export": "0" * 16}})
    push_head(head, "s3://heads/runs/again", shown.console)
    assert "stdlib" not in s3.read("runs/again/README.md").decode()
    assert "measured another export" in shown.text


def test_the_stage_pushes_where_the_recipe_says(
    head: Path, s3: Store, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(stages, "require", lambda _run, stage: asked.append(stage))
    recipe = SimpleNamespace(push=SimpleNamespace(to=PLACE))
    run: Any = SimpleNamespace(recipe=recipe, head_dir=head, source="recipes/mine.yaml")
    first, again = push(run, shown.console), push(run, shown.console)
    assert asked == ["export", "export"]
    assert (first.name, first.skipped, again.skipped) == ("push", False, True)
    assert PLACE in first.message and "manifest.json" in s3.names("runs/mine")

    recipe.push.to = None
    with pytest.raises(PeagleError, match=r"recipes/mine\.yaml: push\.to: not set; expected s3://"):
        push(run, shown.console)


def test_a_card_of_the_users_own_is_kept(head: Path, s3: Store, shown: Shown) -> None:
    (head / "README.md").write_text("# Mine\n")
    push_head(head, PLACE, shown.console)
    assert s3.read("runs/mine/README.md") == b"# Mine\n"


def test_secrets_appear_nowhere(
    head: Path,
    s3: Store,
    hub: HubStub,
    shown: Shown,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    for place in (PLACE, "hf://me/mine"):
        push_head(head, place, shown.console)
    hub.token = "changed"
    with pytest.raises(PeagleError) as refused:
        push_head(head, "hf://me/mine", shown.console)
    captured = capfd.readouterr()
    texts = [shown.text, caplog.text, captured.out, captured.err, str(refused.value), repr(refused.value)]
    texts += [s3.read(f"runs/mine/{name}").decode("latin-1") for name in s3.names("runs/mine")]
    texts += [blob.content.decode("latin-1") for blob in hub.repositories["me/mine"].files().values()]
    texts += [path.read_text("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    for secret in SECRETS:
        assert not any(secret in text for text in texts)


def test_addresses_are_shown_without_their_secrets() -> None:
    assert printable("https://user:word@host:9000/a/b?X-Amz-Signature=1") == "https://host:9000/a/b"
    assert without_queries("Failed at 'http://h/p?sig=1', retry") == "Failed at 'http://h/p', retry"


def entries(**contents: str) -> Manifest:
    return Manifest({name: FileEntry(len(text), text) for name, text in contents.items()})


def test_manifest_text_is_read_back_and_damage_is_named() -> None:
    manifest = entries(b="1", a="22")
    assert Manifest.parse(manifest.to_json(), "there") == manifest
    for broken in ("{", "[]", '{"format": "other"}', json.dumps({"format": "peagle-head-manifest/1"})):
        with pytest.raises(CorruptError, match=r"^there: "):
            Manifest.parse(broken, "there")


def test_comparison_of_a_head_with_a_place() -> None:
    new, old = entries(a="1", b="2"), entries(a="0", c="3")
    everything = compare(new, set(), set(), None, "there", force=False)
    assert everything.send == ("a", "b") and not everything.complete
    # All is there but the seal: an interrupted push, to be completed without force.
    assert compare(new, {"a", "b"}, {"a", "b"}, None, "there", force=False).send == ()
    assert compare(new, {"a", "b"}, {"a", "b", "x"}, new, "there", force=False).complete
    with pytest.raises(StaleError, match="there: other content stands there: a, c"):
        compare(new, set(), {"a", "c"}, old, "there", force=False)
    forced = compare(new, set(), {"a", "c", "x"}, old, "there", force=True)
    assert (forced.send, forced.remove, forced.kept) == (("a", "b"), ("c",), ("x",))
