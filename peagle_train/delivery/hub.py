"""A head in a model repository of the Hub.

    hf://owner/name[@branch]     all files and the manifest in ONE commit, then each file is read back

The commit is the unit a reader sees, so nothing half-sent is ever visible. What is read back comes
from exactly that commit; should it differ, a second commit withdraws the manifest. A repository made
here is private. The token comes from huggingface_hub's own chain (`hf auth login`, HF_TOKEN), the
endpoint from HF_ENDPOINT.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_token,
    hf_hub_url,
)
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    hf_raise_for_status,
    http_stream_backoff,
    validate_repo_id,
)
from rich.console import Console

from peagle_train.delivery.hub_errors import plain_words
from peagle_train.delivery.manifest import (
    MANIFEST_NAME,
    Comparison,
    FileEntry,
    Manifest,
    compare,
    entry_of,
    read_back_matches,
)
from peagle_train.delivery.progress import printable, transfer_bar
from peagle_train.errors import CorruptError, PeagleError

# Made by the Hub itself in every repository; no part of a head.
_OF_THE_HUB = {".gitattributes"}
_BLOCK = 1 << 20


@dataclass(frozen=True)
class HubPlace:
    """A model repository and the branch that receives the commit."""

    repo_id: str
    branch: str

    @classmethod
    def parse(cls, destination: str) -> HubPlace:
        """Reads `hf://owner/name` or `hf://owner/name@branch`."""
        repo_id, _, branch = destination.removeprefix("hf://").strip("/").partition("@")
        if repo_id.count("/") != 1 or (destination.count("@") and not branch):
            raise PeagleError(f"{destination}: expected hf://owner/name or hf://owner/name@branch")
        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise PeagleError(f"{destination}: {error}") from None
        if re.fullmatch(r"[0-9a-f]{40}", branch):
            raise PeagleError(
                f"{destination}: a commit cannot be pushed to; name a branch, or leave it out for main"
            )
        return cls(repo_id, branch or "main")

    @property
    def url(self) -> str:
        return f"hf://{self.repo_id}" + ("" if self.branch == "main" else f"@{self.branch}")

    @property
    def title(self) -> str:
        return self.repo_id.rpartition("/")[2]


def deliver(
    place: HubPlace, paths: Mapping[str, Path], manifest: Manifest, console: Console, *, force: bool
) -> tuple[Comparison, str]:
    """Makes the head stand at `place`; returns what was done and the address of the commit.

    Args and raises as `s3.deliver`.
    """
    # Read now and not when huggingface_hub was imported, so that a caller may set it in between.
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    with plain_words(place.url, place.repo_id, endpoint):
        if get_token() is None:
            raise PeagleError(f"{place.url}: no Hub token found; run `hf auth login` or set HF_TOKEN")
        api = HfApi(endpoint=endpoint)
        parent, private = _open(api, place)
        present = _list(api, place, parent)
        old = None
        if MANIFEST_NAME in present:
            try:
                text = b"".join(_content(api, place, parent, MANIFEST_NAME))
                old = Manifest.parse(text, f"{place.url}/{MANIFEST_NAME}")
                del present[MANIFEST_NAME]
            except CorruptError:
                pass  # not a head's manifest, so somebody else's file
        equal = {
            name
            for name, entry in manifest.files.items()
            if name in present and _listed_as(present[name], entry, paths[name])
        }
        todo = compare(manifest, equal, set(present), old, place.url, force=force)
        commit = parent
        if not todo.complete:
            commit = _commit(api, place, parent, (*todo.send, MANIFEST_NAME), todo.remove, paths, console)
        if not private:
            console.print(
                f"{place.repo_id} is public: it was before this push, and is left so",
                markup=False,
                highlight=False,
            )
        seal = Manifest.of({MANIFEST_NAME: paths[MANIFEST_NAME]}).files
        expected = manifest.files if todo.complete else {**manifest.files, **seal}
        try:
            _verify(api, place, commit, expected, paths, console)
        except CorruptError:
            if not todo.complete:
                _withdraw(api, place, commit)
            raise
        return todo, f"{printable(endpoint)}/{place.repo_id}/tree/{commit}"


def _open(api: HfApi, place: HubPlace) -> tuple[str, bool]:
    """The branch's newest commit and whether the repository is private; makes what is missing."""
    try:
        info = api.model_info(place.repo_id, revision=place.branch)
    except RepositoryNotFoundError:
        # Private, and the last word on whether the token may: a refusal here names the owner.
        api.create_repo(place.repo_id, private=True, exist_ok=True)
        if place.branch != "main":
            api.create_branch(place.repo_id, branch=place.branch, exist_ok=True)
        info = api.model_info(place.repo_id, revision=place.branch)
    except RevisionNotFoundError:
        api.create_branch(place.repo_id, branch=place.branch, exist_ok=True)
        info = api.model_info(place.repo_id, revision=place.branch)
    if info.sha is None:
        raise PeagleError(f"{place.url}: the Hub names no commit for {place.branch}; check HF_ENDPOINT")
    return info.sha, bool(info.private)


def _list(api: HfApi, place: HubPlace, commit: str) -> dict[str, RepoFile]:
    tree = api.list_repo_tree(place.repo_id, recursive=True, revision=commit)
    return {item.path: item for item in tree if isinstance(item, RepoFile) and item.path not in _OF_THE_HUB}


def _listed_as(item: RepoFile, entry: FileEntry, path: Path) -> bool:
    """Whether the Hub's record names this content: a large file's SHA-256, a small one's git SHA-1."""
    if item.size != entry.size:
        return False
    if item.lfs is not None:
        return item.lfs.sha256 == entry.sha256
    return item.blob_id == hashlib.sha1(b"blob %d\0" % entry.size + path.read_bytes()).hexdigest()


def _commit(
    api: HfApi,
    place: HubPlace,
    parent: str,
    names: tuple[str, ...],
    remove: tuple[str, ...],
    paths: Mapping[str, Path],
    console: Console,
) -> str:
    """One commit that adds and removes; returns its hash. It fails if the branch moved on from `parent`."""
    total = sum(paths[name].stat().st_size for name in names)
    deletions = [CommitOperationDelete(path_in_repo=name, is_folder=False) for name in remove]

    def commit(additions: list[CommitOperationAdd]) -> str:
        return api.create_commit(
            place.repo_id,
            [*additions, *deletions],
            commit_message=f"Deliver a drafter head ({len(names)} files)",
            revision=place.branch,
            parent_commit=parent,
        ).oid

    if importlib.util.find_spec("hf_xet") and not constants.HF_HUB_DISABLE_XET:
        # Xet reads the files in its own threads and skips chunks the Hub has; its own bar shows the rate.
        return commit([CommitOperationAdd(name, paths[name]) for name in names])
    with transfer_bar(console, "Uploading", total) as advance, _hub_bars_off():
        files = [CountedFile(paths[name], advance) for name in names]
        try:
            additions = [CommitOperationAdd(name, file) for name, file in zip(names, files, strict=True)]
            for file in files:
                file.counting = True  # what was read so far was only hashed
            return commit(additions)
        finally:
            for file in files:
                file.close()


class CountedFile(io.BufferedReader):
    """A file that reports how far it has been read, each byte once, however often it is read again."""

    def __init__(self, path: Path, advance: Callable[[int], None]):
        super().__init__(io.FileIO(path))
        self.counting = False
        self._advance = advance
        self._furthest = 0

    def read(self, size: int | None = -1, /) -> bytes:
        block = super().read(size)
        if self.counting and (position := self.tell()) > self._furthest:
            self._advance(position - self._furthest)
            self._furthest = position
        return block


@contextmanager
def _hub_bars_off() -> Iterator[None]:
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _verify(
    api: HfApi,
    place: HubPlace,
    commit: str,
    expected: Mapping[str, FileEntry],
    paths: Mapping[str, Path],
    console: Console,
) -> None:
    """Reads the commit back: the listing must name every file's content, and the content must be that."""
    listed = _list(api, place, commit)
    for name, entry in expected.items():
        if name not in listed or not _listed_as(listed[name], entry, paths[name]):
            state = "lacks" if name not in listed else "records other content for"
            raise CorruptError(f"{place.url}: commit {commit} {state} {name}. Push again with --force")
    with transfer_bar(console, "Verifying", sum(entry.size for entry in expected.values())) as advance:
        for name, entry in expected.items():
            found = entry_of(_content(api, place, commit, name), advance)
            read_back_matches(entry, found, name, place.url)


def _content(api: HfApi, place: HubPlace, commit: str, name: str) -> Iterator[bytes]:
    url = hf_hub_url(place.repo_id, name, revision=commit, endpoint=api.endpoint)
    with http_stream_backoff("GET", url, headers=build_hf_headers()) as response:
        hf_raise_for_status(response)
        yield from response.iter_bytes(_BLOCK)


def _withdraw(api: HfApi, place: HubPlace, commit: str) -> None:
    """Takes the manifest out of a commit that did not verify, so that no reader takes the head for whole."""
    if MANIFEST_NAME not in _list(api, place, commit):
        return
    api.create_commit(
        place.repo_id,
        [CommitOperationDelete(path_in_repo=MANIFEST_NAME, is_folder=False)],
        commit_message="Withdraw the manifest: the head did not arrive whole",
        revision=place.branch,
        parent_commit=commit,
    )
