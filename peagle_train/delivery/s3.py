"""A head under an S3 prefix.

    s3://bucket/prefix/{config.json, model.safetensors, README.md, ...}    each proven, then
    s3://bucket/prefix/manifest.json                                       last

S3 has no transactions, so the manifest is the seal: it is removed before anything is replaced and
written after everything was read back. Credentials, region and endpoint come from boto3's own
chain (environment, profile, instance role; AWS_ENDPOINT_URL for compatible services).
"""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore import exceptions as aws
from botocore.config import Config
from rich.console import Console

from peagle_train.delivery.manifest import (
    MANIFEST_NAME,
    Comparison,
    FileEntry,
    Manifest,
    compare,
    entry_of,
    read_back_matches,
)
from peagle_train.delivery.progress import transfer_bar, without_queries
from peagle_train.errors import CorruptError, PeagleError

PART_BYTES = 16 << 20
_BLOCK = 1 << 20
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True)
class S3Place:
    """A bucket and a prefix without slashes at its ends."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, destination: str) -> S3Place:
        """Reads `s3://bucket/prefix`. A prefix is needed: a head is several files."""
        bucket, _, prefix = destination.removeprefix("s3://").partition("/")
        prefix = prefix.strip("/")
        if not _BUCKET.fullmatch(bucket):
            raise PeagleError(
                f"{destination}: {bucket!r} is no bucket name (3 to 63 of a-z, 0-9, '.', '-'); expected s3://bucket/prefix"
            )
        if not prefix or any(part in ("", ".", "..") for part in prefix.split("/")):
            raise PeagleError(
                f"{destination}: the head needs a prefix of its own, for example s3://{bucket}/heads/my-head"
            )
        return cls(bucket, prefix)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def title(self) -> str:
        return self.prefix.rpartition("/")[2]

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"


def deliver(
    place: S3Place, paths: Mapping[str, Path], manifest: Manifest, console: Console, *, force: bool
) -> tuple[Comparison, str]:
    """Makes the head stand at `place`; returns what was done and where the head is.

    Args:
        paths: local path of every file in `manifest`, and of the manifest itself.

    Raises PeagleError for everything the service refuses, StaleError for other content at the place,
    CorruptError if a file comes back different.
    """
    with _plain_words(place):
        client = _client()
        present = _list(client, place)
        old = None
        if present.pop(MANIFEST_NAME, None) is not None:
            try:
                text = client.get_object(Bucket=place.bucket, Key=place.key(MANIFEST_NAME))["Body"].read()
                old = Manifest.parse(text, f"{place.url}/{MANIFEST_NAME}")
            except CorruptError:
                present[MANIFEST_NAME] = 0  # not a head's manifest, so somebody else's file
        candidates = {name for name, entry in manifest.files.items() if present.get(name) == entry.size}
        equal = set()
        if candidates:
            with transfer_bar(console, "Comparing", sum(present[name] for name in candidates)) as advance:
                for name in sorted(candidates):
                    if _read_back(client, place, name, advance) == manifest.files[name]:
                        equal.add(name)
        todo = compare(manifest, equal, set(present), old, place.url, force=force)
        if not todo.complete:
            outdated = (MANIFEST_NAME, *todo.remove) if old or MANIFEST_NAME in present else ()
            for name in outdated:
                client.delete_object(Bucket=place.bucket, Key=place.key(name))
            _send(client, place, todo.send, paths, manifest.files, console)
            # The manifest describes the others, so its own entry is made here.
            seal = Manifest.of({MANIFEST_NAME: paths[MANIFEST_NAME]}).files
            try:
                _send(client, place, (MANIFEST_NAME,), paths, seal, None)
            except CorruptError:
                client.delete_object(Bucket=place.bucket, Key=place.key(MANIFEST_NAME))
                raise
        return todo, place.url


def _client() -> Any:
    # Downloads are compared with our own SHA-256, so botocore's check would only word the same fault worse.
    config = Config(response_checksum_validation="when_required")
    try:
        return boto3.client("s3", config=config)
    except ValueError as error:  # botocore's only word for an endpoint that is no address
        raise PeagleError(
            f"AWS_ENDPOINT_URL: {without_queries(str(error))}; expected http(s)://host[:port]"
        ) from None


def _list(client: Any, place: S3Place) -> dict[str, int]:
    """Sizes in bytes of everything under the prefix, by name relative to it."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=place.key(""))
    sizes = {
        item["Key"].removeprefix(place.key("")): item["Size"]
        for page in pages
        for item in page.get("Contents", ())
    }
    sizes.pop("", None)  # the empty object by which consoles mark a folder
    return sizes


def _send(
    client: Any,
    place: S3Place,
    names: tuple[str, ...],
    paths: Mapping[str, Path],
    entries: Mapping[str, FileEntry],
    console: Console | None,
) -> None:
    """Uploads files, then proves each: the service's own checksum, and the content read back."""
    config = TransferConfig(
        multipart_threshold=PART_BYTES,
        multipart_chunksize=PART_BYTES,
        max_concurrency=4,
        preferred_transfer_client="classic",
    )
    total = sum(entries[name].size for name in names)
    with _bar(console, "Uploading", total) as advance:
        for name in names:
            kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
            with paths[name].open("rb") as file:
                client.upload_fileobj(
                    file,
                    place.bucket,
                    place.key(name),
                    ExtraArgs={"ChecksumAlgorithm": "SHA256", "ContentType": kind},
                    Callback=advance,
                    Config=config,
                )
    with _bar(console, "Verifying", total) as advance:
        for name in names:
            _check_service_checksum(client, place, name, paths[name])
            read_back_matches(entries[name], _read_back(client, place, name, advance), name, place.url)


@contextmanager
def _bar(console: Console | None, title: str, total: int) -> Iterator[Callable[[int], None]]:
    if console is None or not total:
        yield lambda _: None
        return
    with transfer_bar(console, title, total) as advance:
        yield advance


def _read_back(client: Any, place: S3Place, name: str, advance: Callable[[int], None]) -> FileEntry:
    body = client.get_object(Bucket=place.bucket, Key=place.key(name))["Body"]
    return entry_of(body.iter_chunks(_BLOCK), advance)


def _check_service_checksum(client: Any, place: S3Place, name: str, path: Path) -> None:
    """Compares the checksum that the service itself computed.

    For an object sent in parts S3 reports the SHA-256 of the parts' SHA-256s and may append their number.
    Compatible services may report none; the content is read back in any case.
    """
    head = client.head_object(Bucket=place.bucket, Key=place.key(name), ChecksumMode="ENABLED")
    if "ChecksumSHA256" not in head:
        return
    reported = head["ChecksumSHA256"].partition("-")[0]
    composite = path.stat().st_size >= PART_BYTES and head.get("ChecksumType") != "FULL_OBJECT"
    expected = _checksum(path, PART_BYTES if composite else None)
    if reported != expected:
        raise CorruptError(
            f"{place.url}: the service's SHA-256 of {name} is {reported} (base64), expected {expected}. "
            "The upload was damaged; no manifest was written. Push again with --force"
        )


def _checksum(path: Path, part: int | None) -> str:
    """SHA-256 in base64, as S3 writes it: of the content, or of the digests of its parts of `part` bytes."""
    with path.open("rb") as file:
        if part is None:
            digest = hashlib.file_digest(file, "sha256").digest()
        else:
            blocks = iter(lambda: file.read(part), b"")
            digest = hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).digest()
    return base64.b64encode(digest).decode()


_CREDENTIALS_REFUSED = {
    "InvalidAccessKeyId": "the access key is not known to the service",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the credentials have expired",
    "InvalidToken": "the session token is not valid",
    "InvalidClientTokenId": "the session token is not valid",
}
_OTHER_REGION = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "301",
}


@contextmanager
def _plain_words(place: S3Place) -> Iterator[None]:
    """Turns what boto3 raises into errors that say what to do, without credential or signed address."""
    try:
        yield
    except (aws.NoCredentialsError, aws.PartialCredentialsError, aws.CredentialRetrievalError) as error:
        raise PeagleError(
            f"{place.url}: no usable AWS credentials found ({type(error).__name__}). "
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile in AWS_PROFILE, "
            "log in with `aws sso login`, or run where a role is attached"
        ) from None
    except aws.ProfileNotFound as error:
        raise PeagleError(f"{place.url}: {error}; check AWS_PROFILE against ~/.aws/config") from None
    except (aws.SSOError, aws.TokenRetrievalError) as error:
        raise PeagleError(
            f"{place.url}: the AWS login is not usable ({type(error).__name__}); run `aws sso login`"
        ) from None
    except aws.ClientError as error:
        raise PeagleError(f"{place.url}: {_refusal(error, place)}") from None
    except (aws.HTTPClientError, aws.ConnectionError, aws.IncompleteReadError) as error:
        # The text of these names the endpoint at most, and that is made printable.
        raise PeagleError(
            f"{place.url}: the S3 service cannot be reached: {without_queries(str(error)).rstrip('.')}. "
            "Check the network, and AWS_ENDPOINT_URL if one is set; nothing counts as delivered"
        ) from None
    except aws.BotoCoreError as error:
        raise PeagleError(f"{place.url}: {without_queries(str(error))}") from None


def _refusal(error: aws.ClientError, place: S3Place) -> str:
    code = str(error.response.get("Error", {}).get("Code", ""))
    action = error.operation_name
    if code == "NoSuchBucket":
        return (
            f"there is no bucket {place.bucket!r}; create it (`aws s3 mb s3://{place.bucket}`) "
            "or correct the name"
        )
    if code in _CREDENTIALS_REFUSED:
        return f"{_CREDENTIALS_REFUSED[code]} ({code}); renew the AWS credentials"
    if code in ("AccessDenied", "AllAccessDisabled", "403"):
        return (
            f"access denied to {action} in bucket {place.bucket!r}; the credentials need s3:ListBucket "
            f"on the bucket, and s3:GetObject, s3:PutObject and s3:DeleteObject on {place.prefix}/*"
        )
    if code in _OTHER_REGION:
        return f"the bucket lies in another region ({code}); set AWS_REGION to the bucket's region"
    if code in ("SlowDown", "Throttling", "RequestLimitExceeded", "503"):
        return (
            f"the service asks for fewer requests ({code} at {action}); push again later, "
            "what has arrived is kept"
        )
    message = without_queries(str(error.response.get("Error", {}).get("Message", "")))
    return f"the service refused {action}: {code} {message}".rstrip()
