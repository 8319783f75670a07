"""Pushing to the Hub, against a local endpoint that speaks its protocol."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from peagle_train.delivery import push_head
from peagle_train.errors import CorruptError, PeagleError, StaleError
from tests.delivery.conftest import HUB_TOKEN, Shown
from tests.delivery.hub_stub import SIGNATURE, HubStub

PLACE = "hf://me/mine"
FILES = {"config.json", "model.safetensors", "export.json", "README.md", "manifest.json"}


def test_one_commit_in_a_private_repository(head: Path, hub: HubStub, shown: Shown) -> None:
    receipt = push_head(head, PLACE, shown.console)

    repository = hub.repositories["me/mine"]
    assert repository.private
    assert len(repository.messages) == 2, "more than one commit after the Hub's own"
    files = repository.files()
    assert set(files) == FILES | {".gitattributes"}
    for path in head.iterdir():
        assert files[path.name].content == path.read_bytes()
    assert set(json.loads(files["manifest.json"].content)["files"]) == FILES - {"manifest.json"}
    assert receipt.location == f"{hub.endpoint}/me/mine/tree/{repository.branches['main']}"
    assert {path.name for path in head.iterdir()} == {"config.json", "model.safetensors", "export.json"}
    for name in FILES:  # each was read back from that very commit
        assert f"GET /me/mine/resolve/{repository.branches['main']}/{name}" in hub.requests
    assert "Uploading" in shown.text and "/s" in shown.text and "Delivered" in shown.text


def test_the_card_reads_well_for_people_and_programs(head: Path, hub: HubStub, shown: Shown) -> None:
    push_head(head, PLACE, shown.console)
    card = hub.repositories["me/mine"].files()["README.md"].content.decode()
    metadata = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", card, re.S).group(1))  # type: ignore[union-attr]
    assert metadata["base_model"] == "someone/small-target"
    assert metadata["license"] == "apache-2.0"
    assert metadata["library_name"] == "vllm" and "speculative-decoding" in metadata["tags"]
    assert '"parallel_drafting": true' in card and "me/mine" in card and "someone/small-target" in card


def test_the_same_head_again_makes_no_commit(head: Path, hub: HubStub, shown: Shown) -> None:
    first = push_head(head, PLACE, shown.console)
    again = push_head(head, PLACE, shown.console)
    assert again.already_there and again.location == first.location
    assert len(hub.repositories["me/mine"].messages) == 2
    assert "Already there" in shown.text


def test_another_head_is_refused_and_replaced_only_by_force(
    head: Path, other_head: Path, hub: HubStub, shown: Shown
) -> None:
    (head / "notes.txt").write_text("only the first head has this")
    push_head(head, PLACE, shown.console)
    with pytest.raises(StaleError, match=r"hf://me/mine: other content stands there: .*model\.safetensors"):
        push_head(other_head, PLACE, shown.console)
    repository = hub.repositories["me/mine"]
    assert len(repository.messages) == 2

    push_head(other_head, PLACE, shown.console, force=True)
    assert len(repository.messages) == 3
    assert set(repository.files()) == FILES | {".gitattributes"}
    assert repository.files()["model.safetensors"].content == (other_head / "model.safetensors").read_bytes()


def test_a_public_repository_stays_public_and_is_named(head: Path, hub: HubStub, shown: Shown) -> None:
    hub.create("me/mine", private=False)
    push_head(head, PLACE, shown.console)
    assert "me/mine is public" in shown.text


def test_a_branch_is_made_and_main_left_alone(head: Path, hub: HubStub, shown: Shown) -> None:
    push_head(head, PLACE + "@v2", shown.console)
    repository = hub.repositories["me/mine"]
    assert set(repository.files("v2")) >= FILES and set(repository.files("main")) == {".gitattributes"}


def test_a_known_large_file_is_not_sent_again(head: Path, hub: HubStub, shown: Shown) -> None:
    push_head(head, PLACE, shown.console)
    push_head(head, "hf://me/copy", shown.console)
    assert len(hub.uploads) == 1


@pytest.mark.parametrize(
    ("altered", "named", "message"),
    [
        ("*.safetensors", "model.safetensors", "came back different"),
        ("config.json", "config.json", "records other content"),
    ],
)
def test_a_damaged_upload_is_noticed_and_its_manifest_withdrawn(
    altered: str, named: str, message: str, head: Path, hub: HubStub, shown: Shown
) -> None:
    hub.corrupt.add(altered)
    with pytest.raises(CorruptError, match=f"({named} {message}|{message} for {named}).*--force"):
        push_head(head, PLACE, shown.console)
    assert "manifest.json" not in hub.repositories["me/mine"].files()
    assert "Delivered" not in shown.text


def test_a_push_of_someone_else_in_between_is_not_overwritten(head: Path, hub: HubStub, shown: Shown) -> None:
    repository = hub.create("me/mine")
    hub.during_commit = lambda: repository.add("main", dict(repository.files()), "someone else")
    with pytest.raises(StaleError, match="someone else wrote to the branch during this push"):
        push_head(head, PLACE, shown.console)
    assert repository.messages == ["initial commit", "someone else"]


def test_refusals_in_plain_words(
    head: Path, hub: HubStub, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PeagleError, match=r"access denied \(403\): the token may not write to stranger/mine"):
        push_head(head, "hf://stranger/mine", shown.console)

    hub.upload_status = 403
    with pytest.raises(PeagleError, match=r"access denied \(403\)") as caught:
        push_head(head, PLACE, shown.console)
    assert SIGNATURE not in str(caught.value)

    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(PeagleError, match=r"does not accept the token \(401\).*hf auth login"):
        push_head(head, PLACE, shown.console)

    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PeagleError, match="no Hub token found; run `hf auth login`"):
        push_head(head, PLACE, shown.console)

    monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PeagleError, match="switched off by HF_HUB_OFFLINE"):
        push_head(head, PLACE, shown.console)


def test_nobody_listens(head: Path, hub: HubStub, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", f"http://user:{HUB_TOKEN}@{address}")
    with pytest.raises(PeagleError, match=f"the Hub at http://{address} cannot be reached") as caught:
        push_head(head, PLACE, shown.console)
    assert HUB_TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    "place",
    ["hf://mine", "hf://me/mine/more", "hf://me/mine@", "hf://me/mi ne", f"hf://me/mine@{'0123456789' * 4}"],
)
def test_a_malformed_place_is_refused(place: str, tmp_path: Path, shown: Shown) -> None:
    with pytest.raises(PeagleError, match=re.escape(place)):
        push_head(tmp_path / "not even looked at", place, shown.console)
