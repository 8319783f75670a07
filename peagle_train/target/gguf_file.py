"""Reading a GGUF file: header, tensor table, dequantised tensors.

The `gguf` package's own reader wraps every one of the 98,000 strings of a vocabulary in an array
object and needs 4 s for it; every command of this program wants the header, so it is parsed here in
0.1 s. The block formats themselves are left to that package (`gguf.quants`).

Layout (GGUF versions 2 and 3, little-endian): magic, version, number of tensors, number of keys;
the keys; the tensor table; then, aligned, the tensor data.
Source: the GGUF specification in the ggml repository, docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from peagle_train.errors import CorruptError, PeagleError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file. shape: in torch's order, slowest axis first."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GGUFFile:
    """A GGUF file's keys and tensors.

    keys: metadata by name, arrays as lists.
    tensors: the tensor table by name; `read` gives the values.
    Raises CorruptError where the file is no GGUF, is truncated, or has an unknown value type.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._parse(file)
        except (struct.error, UnicodeDecodeError) as error:
            raise CorruptError(
                f"{path}: not a whole GGUF file ({error}); expected GGUF version 2 or 3. "
                "Install the file again."
            ) from error

    def _parse(self, file: BinaryIO) -> None:
        magic = file.read(4)
        if magic != _MAGIC:
            raise CorruptError(f"{self.path}: starts with {magic!r}; expected {_MAGIC!r}, a GGUF file")
        (version,) = _take(file, "I")
        if version not in (2, 3):
            raise CorruptError(f"{self.path}: GGUF version {version}; expected 2 or 3")
        tensor_count, key_count = _take(file, "QQ")
        self.keys: dict[str, Any] = {}
        for _ in range(key_count):
            name = _string(file)
            (kind,) = _take(file, "I")
            self.keys[name] = self._value(file, kind)
        self.tensors: dict[str, TensorEntry] = {}
        for _ in range(tensor_count):
            name = _string(file)
            (rank,) = _take(file, "I")
            sizes = _take(file, f"{rank}Q")
            type_id, offset = _take(file, "IQ")
            self.tensors[name] = TensorEntry(name, tuple(reversed(sizes)), type_id, offset)
        alignment = self.keys.get("general.alignment", _DEFAULT_ALIGNMENT)
        self._data_start = math.ceil(file.tell() / alignment) * alignment

    def _value(self, file: BinaryIO, kind: int) -> Any:
        if kind == _STRING:
            return _string(file)
        if kind == _ARRAY:
            item, count = _take(file, "IQ")
            if item in _SCALARS:
                return list(_take(file, f"{count}{_SCALARS[item]}"))
            return [self._value(file, item) for _ in range(count)]
        if kind not in _SCALARS:
            raise CorruptError(f"{self.path}: value type {kind} is not known to GGUF version 3")
        return _take(file, _SCALARS[kind])[0]

    def need(self, key: str) -> Any:
        """The value of a key; PeagleError naming it where the file lacks it."""
        if key not in self.keys:
            raise PeagleError(
                f"{self.path}: the GGUF header has no `{key}`, which is needed to build the model"
            )
        return self.keys[key]

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor, dequantised to float32, in torch's axis order."""
        import gguf

        entry = self.tensors[name]
        kind = gguf.GGMLQuantizationType(entry.type_id)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        *rows, columns = entry.shape
        shape, start = (*rows, columns // block * size), self._data_start + entry.offset
        if start + math.prod(shape) > self.path.stat().st_size:
            raise CorruptError(
                f"{self.path}: ends before the data of tensor {name!r}. Install the file again."
            )
        raw = np.memmap(self.path, dtype=np.uint8, mode="r", offset=start, shape=shape)
        if kind == gguf.GGMLQuantizationType.F32:
            return np.array(raw.view(np.float32).reshape(entry.shape))
        return np.array(gguf.quants.dequantize(raw, kind), dtype=np.float32).reshape(entry.shape)


def _take(file: BinaryIO, form: str) -> tuple[Any, ...]:
    size = struct.calcsize("<" + form)
    return struct.unpack("<" + form, file.read(size))


def _string(file: BinaryIO) -> str:
    (length,) = _take(file, "Q")
    content = file.read(length)
    if len(content) != length:
        raise struct.error(f"a string of {length} bytes ends after {len(content)}")
    return content.decode("utf-8")
