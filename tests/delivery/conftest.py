"""Real services on loopback, and a real exported head to send to them."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from huggingface_hub import constants
from moto.server import ThreadedMotoServer
from rich.console import Console

from peagle_train.export.layout import export_head
from peagle_train.target.facts import TargetFacts
from tests.delivery.hub_stub import HubStub
from tests.head.toys import CONFIG, toy_head

ACCESS_KEY = "AKIATESTACCESSKEY042"
SECRET_KEY = "a-secret-key-that-must-never-be-seen"
HUB_TOKEN = "hf_aTokenThatMustNeverBeSeen"
SECRETS = (ACCESS_KEY, SECRET_KEY, HUB_TOKEN)
BUCKET = "heads"

FACTS = TargetFacts(
    model="someone/small-target",
    class_name="LlamaForCausalLM",
    num_layers=6,
    hidden_size=CONFIG.target_hidden_size,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=CONFIG.vocab_size,
    max_position_embeddings=CONFIG.max_position_embeddings,
    rope_theta=10_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    logit_softcap=None,
)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Exports a small random head once per seed."""
    root = tmp_path_factory.mktemp("exported")

    def export(seed: int) -> Path:
        directory = root / str(seed)
        if not directory.exists():
            head = toy_head(seed, torch.float32)
            extra = {"k": 4, "positions": 6, "license": "apache-2.0"}
            export_head(head, directory, target=FACTS, dtype="float32", extra=extra)
        return directory

    return export


@pytest.fixture
def head(exported: Callable[[int], Path], tmp_path: Path) -> Path:
    """A head folder of this test's own."""
    return Path(shutil.copytree(exported(0), tmp_path / "run" / "head"))


@pytest.fixture
def other_head(exported: Callable[[int], Path], tmp_path: Path) -> Path:
    """Another head: same names, other weights."""
    return Path(shutil.copytree(exported(1), tmp_path / "other" / "head"))


class Shown:
    """A console and what was printed on it, on one line per message."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self.console = Console(file=self._file, force_terminal=True, width=200)

    @property
    def text(self) -> str:
        return self._file.getvalue()


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials, endpoints or tokens but those that a test sets; no retries."""
    for name in (
        "AWS_PROFILE",
        "AWS_SESSION_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@dataclass
class Store:
    """The S3 server as its owner sees it."""

    endpoint: str
    client: Any

    def names(self, prefix: str) -> set[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix + "/").get("Contents", [])
        return {item["Key"].removeprefix(prefix + "/") for item in found}

    def read(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())


@pytest.fixture(scope="session")
def s3_service() -> Iterator[Store]:
    """A server for all tests; to make a client takes longer than most of them."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    session = boto3.session.Session(ACCESS_KEY, SECRET_KEY, region_name="us-east-1")
    yield Store(endpoint, session.client("s3", endpoint_url=endpoint))
    server.stop()


@pytest.fixture
def s3(s3_service: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty bucket `heads`, and credentials in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_service.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    client = s3_service.client
    client.create_bucket(Bucket=BUCKET)
    yield s3_service
    for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    client.delete_bucket(Bucket=BUCKET)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    """An empty Hub, and the token in the environment."""
    with HubStub(HUB_TOKEN) as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.endpoint)
        monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
        yield stub
