"""Metadata of a .gguf file and the shapes of its tensors, read without what the tensors hold and without torch.

The gguf package's reader makes an array of every string of the file: seconds and a hundred megabytes for a vocabulary.
Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)

_STRING = 8
_ARRAY = 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type to its struct format, all little-endian."""


class GgufError(Exception):
    """The file is no GGUF, or a damaged one. The message does not repeat its path."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says of itself."""

    metadata: dict[str, Any]
    """Strings, numbers, booleans and lists of them."""
    shapes: dict[str, tuple[int, ...]]
    """Of each tensor; the innermost dimension comes first."""


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return a file's metadata: strings, numbers, booleans and lists of them. Raises GgufError, OSError."""
    with _reading(path) as reader:
        return reader.read_metadata()


def read_gguf_header(path: Path) -> GgufHeader:
    """Return a file's metadata and the shapes of its tensors. Raises GgufError, OSError."""
    with _reading(path) as reader:
        return GgufHeader(reader.read_metadata(), reader.read_shapes())


@contextmanager
def _reading(path: Path) -> Iterator[_Reader]:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise GgufError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield _Reader(data)


class _Reader:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0
        self._num_tensors = 0

    def read_metadata(self) -> dict[str, Any]:
        if self._bytes(4) != _MAGIC:
            raise GgufError("not a GGUF file: it does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise GgufError(f"GGUF version {version}; known are {_VERSIONS[0]} and {_VERSIONS[1]}")
        self._num_tensors = self._scalar("Q")
        count = self._scalar("Q")
        return {self._string(): self._value(self._scalar("I")) for _ in range(count)}

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        """Read what follows the metadata."""
        shapes = {}
        for _ in range(self._num_tensors):
            name = self._string()
            shapes[name] = self._unpack(f"<{self._scalar('I')}Q")
            self._unpack("<IQ")  # type and offset
        return shapes

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        raise GgufError(f"metadata holds a value of unknown type {kind}")

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            return [self._value(kind) for _ in range(count)]
        return list(self._unpack(f"<{count}{_SCALARS[kind]}"))

    def _scalar(self, scalar: str) -> Any:
        return self._unpack(f"<{scalar}")[0]

    def _string(self) -> str:
        try:
            return self._bytes(self._scalar("Q")).decode()
        except UnicodeDecodeError as error:
            raise GgufError("metadata holds a string that is not UTF-8") from error

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from(layout, self._data, self._position)
        except struct.error as error:
            raise GgufError("the file ends within its metadata") from error
        self._position += struct.calcsize(layout)
        return values

    def _bytes(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise GgufError("the file ends within its metadata")
        data = self._data[self._position : end]
        self._position = end
        return data
