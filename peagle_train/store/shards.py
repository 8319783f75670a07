"""Where the files with the states lie: in the store's folder, or at a URL behind a local cache.

What is small (token ids, sidecars, the index) lies in the folder in either case, and at the URL once more, so
that either can be copied alone. Below the URL each store has a folder of the name of its fingerprint:
stores of other inputs never meet there.

    URL/FINGERPRINT/batch-00012.safetensors, then .tokens.safetensors, then .json, and index.json at the end
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

from peagle_train.errors import CorruptError, PeagleError
from peagle_train.files import require_room, sha256_of
from peagle_train.remote import check_url, filesystem, make_folder, plain_words
from peagle_train.store.cache import Cache
from peagle_train.store.format import Piece, checksum_of_bytes

_BLOCK = 16 << 20


class Shards(Protocol):
    """The files with the states of one store, by name."""

    where: str

    def sizes(self) -> dict[str, int]:
        """Bytes of every file that is there."""

    def take(self, file: Path) -> None:
        """Takes in a finished file of the store's folder."""

    def read(self, row: int, name: str, piece: Piece) -> bytearray:
        """The bytes of a piece of a row; not proven."""

    def sha256(self, name: str) -> str:
        """Of a whole file, read where it lies."""

    def set_aside(self, name: str, aside: str) -> None:
        """Moves a file, if it is there, to a folder beside this one."""


class LocalShards:
    """They lie in the store's folder, where the writer puts them."""

    def __init__(self, directory: Path):
        self.directory, self.where = directory, str(directory)

    def sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.directory.glob("batch-*.safetensors")}

    def take(self, file: Path) -> None:
        """It is there."""

    def read(self, row: int, name: str, piece: Piece) -> bytearray:
        return read_piece(self.directory / name, piece)

    def sha256(self, name: str) -> str:
        return sha256_of(self.directory / name)

    def set_aside(self, name: str, aside: str) -> None:
        file, folder = self.directory / name, self.directory.with_name(f"{self.directory.name}.{aside}")
        if file.is_file():
            folder.mkdir(exist_ok=True)
            file.replace(folder / name)


class RemoteShards:
    """They lie below a URL; what is read of them is kept in a cache.

    Raises PeagleError for a URL that is none or has no client here.
    """

    def __init__(self, directory: Path, url: str, fingerprint: str, cache: int):
        self.url = check_url(url, "states.url")
        self.where = f"{self.url}/{fingerprint}"
        self.cache = Cache(directory / ".cache", cache)
        self._fs, self._root = filesystem(self.where)

    def sizes(self) -> dict[str, int]:
        with plain_words(self.where, "list what lies there"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        return {path.rpartition("/")[2]: entry["size"] for path, entry in found.items()}

    def take(self, file: Path) -> None:
        place = self._path(file.name)
        with plain_words(f"{self.where}/{file.name}", "send it there"):
            make_folder(self._fs, self._root)
            self._fs.put_file(str(file), place)
            self._fs.invalidate_cache()
            size = self._fs.size(place)
        if size != file.stat().st_size:
            raise PeagleError(
                f"{self.where}/{file.name}: {size} bytes arrived of {file.stat().st_size}; run the command "
                "again"
            )

    def read(self, row: int, name: str, piece: Piece) -> bytearray:
        if not piece.bytes:
            return bytearray()

        def fetch() -> bytearray:
            with plain_words(f"{self.where}/{name}", f"read row {row}"):
                end = piece.begin + piece.bytes
                return bytearray(self._fs.cat_file(self._path(name), start=piece.begin, end=end))

        return self.cache.get(
            f"{row:08d}-{piece.xxh3}", fetch, lambda data: checksum_of_bytes(data) == piece.xxh3
        )

    def sha256(self, name: str) -> str:
        digest = hashlib.sha256()
        with plain_words(f"{self.where}/{name}", "read it"), self._fs.open(self._path(name), "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest()

    def set_aside(self, name: str, aside: str) -> None:
        with plain_words(f"{self.where}/{name}", "move it"):
            if self._fs.exists(self._path(name)):
                make_folder(self._fs, f"{self._root}.{aside}")
                self._fs.mv(self._path(name), f"{self._root}.{aside}/{name}")
                self._fs.invalidate_cache()

    def require_room(self, stored: int) -> None:
        """Raises PeagleError unless the disk can hold the cache of a store of so many bytes."""
        folder = self.cache.directory
        lying = sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0
        require_room(folder, min(self.cache.limit, stored) - lying, "the cache of states (states.cache)")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def shards_of(directory: Path, fingerprint: str, url: str | None, cache: int) -> LocalShards | RemoteShards:
    """The shards of a store whose folder is `directory`."""
    return LocalShards(directory) if url is None else RemoteShards(directory, url, fingerprint, cache)


def read_piece(path: Path, piece: Piece) -> bytearray:
    """The bytes of a piece. Raises CorruptError if the file ends before."""
    data = bytearray(piece.bytes)
    with path.open("rb", buffering=0) as file:
        file.seek(piece.begin)
        got = file.readinto(data)
        while 0 < got < piece.bytes and (more := file.readinto(memoryview(data)[got:])):
            got += more
    if got != piece.bytes:
        raise CorruptError(f"{path}: ends at byte {piece.begin + got}, before the row does")
    return data
