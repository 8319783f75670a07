"""Pushing to S3, against a real HTTP service."""

from __future__ import annotations

import json
import shutil
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.s3.models import S3Backend

from peagle_train.delivery import push_head
from peagle_train.delivery import s3 as s3_module
from peagle_train.errors import CorruptError, PeagleError, StaleError
from peagle_train.files import sha256_of
from peagle_train.stages import seal
from tests.delivery.conftest import ACCESS_KEY, BUCKET, SECRET_KEY, Shown, Store

PLACE = f"s3://{BUCKET}/runs/mine"
FILES = {"config.json", "model.safetensors", "export.json", "README.md"}


def test_a_pushed_head_is_whole_sealed_and_equal(head: Path, s3: Store, shown: Shown) -> None:
    before = {path.name: sha256_of(path) for path in head.iterdir()}
    seal(head, {"stage": "export"}, 1.0)  # the run's own record stays at home
    (head / ".hidden").write_text("")

    receipt = push_head(head, PLACE, shown.console)

    assert s3.names("runs/mine") == FILES | {"manifest.json"}
    assert s3.read("runs/mine/model.safetensors") == (head / "model.safetensors").read_bytes()
    manifest = json.loads(s3.read("runs/mine/manifest.json"))
    assert set(manifest["files"]) == FILES
    for name, entry in manifest["files"].items():
        content = s3.read(f"runs/mine/{name}")
        assert entry["size"] == len(content)
        if name in before:
            assert entry["sha256"] == before[name]
    assert receipt.location == PLACE and set(receipt.sent) == FILES and not receipt.already_there
    assert {path.name: sha256_of(path) for path in head.iterdir() if path.name in before} == before
    assert not (head / "README.md").exists() and not (head / "manifest.json").exists()
    assert "Uploading" in shown.text and "/s" in shown.text and "Delivered: " + PLACE in shown.text


def test_the_manifest_is_sent_after_everything_was_proven(
    head: Path, s3: Store, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    make = boto3.client

    def recording(*args: Any, **kwargs: Any) -> Any:
        client = make(*args, **kwargs)
        note = lambda params, model, **_: events.append((model.name, params.get("Key", "")))  # noqa: E731
        client.meta.events.register("before-parameter-build.s3", note)
        return client

    monkeypatch.setattr(s3_module.boto3, "client", recording)
    push_head(head, PLACE, shown.console)
    seal = events.index(("PutObject", "runs/mine/manifest.json"))
    for name in FILES:
        assert events.index(("PutObject", f"runs/mine/{name}")) < seal
        assert events.index(("GetObject", f"runs/mine/{name}")) < seal
    assert ("GetObject", "runs/mine/manifest.json") in events[seal:]


def test_large_files_go_in_parts_and_their_checksum_is_compared(
    head: Path, s3: Store, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = 5 << 20  # the smallest that S3 takes
    monkeypatch.setattr(s3_module, "PART_BYTES", part)
    (head / "extra.txt").write_bytes(b"0123456789abcdef" * (part // 8))  # two parts
    push_head(head, PLACE, shown.console)
    answer = s3.client.get_object(Bucket=BUCKET, Key="runs/mine/extra.txt", ChecksumMode="ENABLED")
    assert answer["ChecksumSHA256"].endswith("-2"), "not sent in two parts"

    (head / "extra.txt").write_bytes(b"0" * (2 * part))
    with pytest.raises(CorruptError, match=r"the service's SHA-256 of extra\.txt"):
        s3_module._check_service_checksum(
            s3.client, s3_module.S3Place.parse(PLACE), "extra.txt", head / "extra.txt"
        )


def test_the_same_head_again_sends_nothing(head: Path, s3: Store, shown: Shown) -> None:
    first = push_head(head, PLACE, shown.console)
    stamp = s3.client.head_object(Bucket=BUCKET, Key="runs/mine/manifest.json")["LastModified"]
    again = push_head(head, PLACE + "/", shown.console)
    assert again.already_there and again.sent == ()
    assert again.manifest_sha256 == first.manifest_sha256
    assert s3.client.head_object(Bucket=BUCKET, Key="runs/mine/manifest.json")["LastModified"] == stamp
    assert "Already there" in shown.text


def test_another_head_is_refused_and_replaced_only_by_force(
    head: Path, other_head: Path, s3: Store, shown: Shown
) -> None:
    (head / "notes.txt").write_text("only the first head has this")
    push_head(head, PLACE, shown.console)
    with pytest.raises(StaleError, match=r"other content stands there: .*model\.safetensors.*--force"):
        push_head(other_head, PLACE, shown.console)
    assert s3.read("runs/mine/model.safetensors") == (head / "model.safetensors").read_bytes()

    receipt = push_head(other_head, PLACE, shown.console, force=True)
    assert not receipt.already_there
    assert s3.read("runs/mine/model.safetensors") == (other_head / "model.safetensors").read_bytes()
    assert s3.names("runs/mine") == FILES | {"manifest.json"}, "a file of the replaced head is left over"


def test_files_of_others_are_never_removed(head: Path, s3: Store, shown: Shown) -> None:
    s3.client.put_object(Bucket=BUCKET, Key="runs/mine/holiday.jpg", Body=b"mine")
    s3.client.put_object(Bucket=BUCKET, Key="runs/mine/manifest.json", Body=b'{"name": "a web app"}')
    with pytest.raises(StaleError, match=r"holiday\.jpg, manifest\.json"):
        push_head(head, PLACE, shown.console)
    push_head(head, PLACE, shown.console, force=True)
    assert s3.read("runs/mine/holiday.jpg") == b"mine"
    assert "Left alone, no part of the head: holiday.jpg" in shown.text

    s3.client.put_object(Bucket=BUCKET, Key="runs/mine/more.safetensors", Body=b"weights of nobody")
    (head / "notes.txt").write_text("new")
    with pytest.raises(StaleError, match=r"more\.safetensors belong to no head"):
        push_head(head, PLACE, shown.console, force=True)


def test_a_push_that_was_cut_off_is_completed(head: Path, s3: Store, shown: Shown) -> None:
    push_head(head, PLACE, shown.console)
    s3.client.delete_object(Bucket=BUCKET, Key="runs/mine/manifest.json")
    s3.client.delete_object(Bucket=BUCKET, Key="runs/mine/model.safetensors")
    receipt = push_head(head, PLACE, shown.console)
    assert receipt.sent == ("model.safetensors",)
    assert "manifest.json" in s3.names("runs/mine")


@pytest.fixture
def corrupting(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The service stores one bit of a file wrongly, after it took its checksum."""
    genuine = S3Backend.put_object

    def corrupt(name: str) -> None:
        def put(self: S3Backend, bucket: str, key: str, value: bytes, **more: Any) -> Any:
            if key.endswith(name):
                value = bytes([value[0] ^ 1]) + value[1:]
            return genuine(self, bucket, key, value, **more)

        monkeypatch.setattr(S3Backend, "put_object", put)

    return corrupt


@pytest.mark.parametrize("name", ["model.safetensors", "README.md", "manifest.json"])
def test_a_damaged_upload_is_noticed_and_never_sealed(
    name: str, head: Path, s3: Store, shown: Shown, corrupting: Callable[[str], None]
) -> None:
    corrupting(name)
    with pytest.raises(CorruptError, match=f"{name} came back different.*--force"):
        push_head(head, PLACE, shown.console)
    assert "manifest.json" not in s3.names("runs/mine")
    assert "Delivered" not in shown.text


def test_a_damaged_file_at_the_place_is_seen_on_the_next_push(head: Path, s3: Store, shown: Shown) -> None:
    push_head(head, PLACE, shown.console)
    content = s3.read("runs/mine/model.safetensors")
    s3.client.put_object(Bucket=BUCKET, Key="runs/mine/model.safetensors", Body=content[:-1] + b"\7")
    with pytest.raises(StaleError, match=r"model\.safetensors"):
        push_head(head, PLACE, shown.console)
    assert push_head(head, PLACE, shown.console, force=True).sent == ("model.safetensors",)
    assert s3.read("runs/mine/model.safetensors") == content


def test_a_missing_bucket(head: Path, s3: Store, shown: Shown) -> None:
    with pytest.raises(PeagleError, match="there is no bucket 'nowhere-at-all'; create it"):
        push_head(head, "s3://nowhere-at-all/mine", shown.console)


def test_no_credentials(head: Path, s3: Store, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(PeagleError, match=r"no usable AWS credentials found.*AWS_ACCESS_KEY_ID"):
        push_head(head, PLACE, shown.console)


def test_nobody_listens(head: Path, s3: Store, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
    with pytest.raises(PeagleError, match=f"cannot be reached: .*{address}.*AWS_ENDPOINT_URL"):
        push_head(head, PLACE, shown.console)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no address")
    with pytest.raises(PeagleError, match="AWS_ENDPOINT_URL: Invalid endpoint: no address; expected http"):
        push_head(head, PLACE, shown.console)


@pytest.fixture
def guarded(s3: Store) -> Iterator[tuple[str, str]]:
    """The service checks credentials; returns the keys of a user without any rights."""
    iam = boto3.session.Session().client("iam")
    iam.create_user(UserName="visitor")
    key = iam.create_access_key(UserName="visitor")["AccessKey"]

    def check_after(actions: str) -> None:
        request = urllib.request.Request(f"{s3.endpoint}/moto-api/reset-auth", data=actions.encode())
        request.add_header("Content-Type", "text/plain")
        urllib.request.urlopen(request).close()

    check_after("0")
    yield key["AccessKeyId"], key["SecretAccessKey"]
    check_after("inf")
    iam.delete_access_key(UserName="visitor", AccessKeyId=key["AccessKeyId"])
    iam.delete_user(UserName="visitor")


def test_credentials_that_are_refused(
    head: Path, guarded: tuple[str, str], shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        PeagleError, match=r"the access key is not known to the service \(InvalidAccessKeyId\)"
    ) as caught:
        push_head(head, PLACE, shown.console)
    assert ACCESS_KEY not in str(caught.value)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", guarded[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", guarded[1])
    boto3.setup_default_session()
    with pytest.raises(PeagleError, match=r"access denied to ListObjectsV2 in bucket 'heads'.*s3:PutObject"):
        push_head(head, PLACE, shown.console)

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    boto3.setup_default_session()
    with pytest.raises(PeagleError, match=r"the secret key does not belong to the access key"):
        push_head(head, PLACE, shown.console)


def test_a_broken_head_is_not_sent(head: Path, s3: Store, shown: Shown) -> None:
    shutil.copy(head / "config.json", head / "model.safetensors")
    with pytest.raises(PeagleError, match=r"model\.safetensors"):
        push_head(head, PLACE, shown.console)
    assert s3.names("runs/mine") == set()
