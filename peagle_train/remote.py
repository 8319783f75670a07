"""Files at a URL, through fsspec: S3 and whatever else it knows.

Credentials come from where the service's own client looks for them (environment, profile, role), never from
the URL: a URL is written to recipes, indices and messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from peagle_train.errors import PeagleError

_BUCKETS = {"s3", "gs", "gcs", "az", "abfs", "oss", "hf"}


def check_url(url: str, key: str) -> str:
    """The URL without slashes at its end. Raises PeagleError, naming the recipe's `key`, if it is none.

    One that carries a user, a password or a query is refused, and not repeated.
    """
    parts = urlsplit(url)
    if not parts.scheme or "://" not in url:
        raise PeagleError(f"{key}: found {url!r}; expected a URL such as s3://BUCKET/PREFIX")
    if "@" in parts.netloc or parts.query:
        raise PeagleError(
            f"{key}: found a {parts.scheme} URL with a user, a password or a query in it; expected none, "
            "because it is written to files and messages. Give credentials in the environment (for S3 "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)"
        )
    return url.rstrip("/")


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path within it. Raises PeagleError if it has no client here."""
    import fsspec  # here, for most stores are local

    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = "'peagle-train[s3]'" if url.startswith("s3:") else "what it names"
        raise PeagleError(
            f"{url}: no client for such a URL is installed ({error}); run `pip install {package}`"
        ) from None
    except ValueError as error:
        raise PeagleError(
            f"{url}: {error}; expected a URL that fsspec knows, such as s3://BUCKET/PREFIX"
        ) from None
    return found


def make_folder(fs: Any, path: str) -> None:
    """Makes a folder where there are such things: in a bucket there are none, and one with a typing error in
    its name must not be made."""
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    if not _BUCKETS & set(protocols):
        fs.makedirs(path, exist_ok=True)


@contextmanager
def plain_words(url: str, what: str) -> Iterator[None]:
    """Turns what a service answers into a PeagleError that says what could not be done, and what to do."""
    from botocore.exceptions import BotoCoreError

    try:
        yield
    except (OSError, BotoCoreError) as error:
        kind = type(error).__name__
        raise PeagleError(
            f"{url}: could not {what} ({kind}: {str(error).partition('?')[0]}); check that the place exists, "
            "the credentials (for S3 the environment or AWS_PROFILE; AWS_ENDPOINT_URL for compatible "
            "services) and the network, and run the command again"
        ) from None
