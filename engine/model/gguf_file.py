"""The container that a .gguf file is: metadata, and tensors that are dequantized as they are read.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvern.engine.errors import ModelError
from kvern.engine.model.fields import Fields


class GGUFFile:
    """The file is mapped into memory. What is asked for and is not there raises ModelError naming it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: set[str] = set()
        reader = _open(path)
        self._metadata = reader.fields
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}

    def text(self, name: str) -> str:
        field = self._metadata.get(name)
        if field is None:
            raise ModelError(f"{self.path}: {name} is missing")
        return str(field.contents())

    def fields(self, section: str) -> Fields:
        """Return the metadata whose names begin with `section` and a dot, without these."""
        prefix = f"{section}."
        named = {name: field for name, field in self._metadata.items() if name.startswith(prefix)}
        values = {name.removeprefix(prefix): field.contents() for name, field in named.items()}
        return Fields(values, f"{self.path}: {section}")

    def token_ids(self, names: tuple[str, ...]) -> frozenset[int]:
        """Return those of the tokenizer's special tokens that the file has."""
        fields = (self._metadata.get(f"tokenizer.ggml.{name}") for name in names)
        return frozenset(int(field.contents()) for field in fields if field is not None)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape as torch has it."""
        return [int(size) for size in reversed(self._tensor(name).shape)]

    def dequantize(self, name: str, part: int | None = None) -> Tensor:
        """Return a tensor, or one part of its first dimension, in float32."""
        tensor = self._tensor(name)
        self._read.add(name)
        data = tensor.data if part is None else tensor.data[part]
        try:
            weights = gguf.dequantize(_joined_rows(data), tensor.tensor_type)
        except NotImplementedError as error:
            raise _unknown_type(self.path, name, tensor.tensor_type.name) from error
        return torch.from_numpy(weights).view(*data.shape[:-1], -1)

    def unread(self) -> list[str]:
        """Return the names of the tensors that were never asked for."""
        return sorted(self._tensors.keys() - self._read)

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return self._tensors[name]


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The library's reader, but that it is quick with lists, and says which tensor has a type it does not know."""

    data: Any

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path, "c")

    def _get(self, *args: Any, **kwargs: Any) -> Any:
        # Many slices are taken; those of a memmap cost three times those of an array.
        self.data = np.asarray(self.data)
        return super()._get(*args, **kwargs)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        # The library takes lists apart item by item: two seconds for a vocabulary, of which the engine needs nothing.
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind, start = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0]), orig_offs + 12
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            if kind is gguf.GGUFValueType.STRING:
                return self._end_of_strings(start, count) - orig_offs, [], [], [gguf.GGUFValueType.ARRAY, kind]
            if kind in self.gguf_scalar_to_np:
                items = self._get(start, self.gguf_scalar_to_np[kind], count)
                size = start - orig_offs + items.nbytes
                return size, list(items.reshape(-1, 1)), list(range(count)), [gguf.GGUFValueType.ARRAY, kind]
        parts: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
        return parts

    def _end_of_strings(self, start: int, count: int) -> int:
        """Return the offset behind so many strings, each behind its length."""
        length = struct.Struct("<Q")
        data, end = memoryview(self.data), start
        for _ in range(count):
            end += length.size + length.unpack_from(data, end)[0]
        return end

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, _, kind, _ = field.parts
            if int(kind[0]) not in gguf.GGML_QUANT_SIZES:
                raise _unknown_type(self._path, bytes(name).decode(), str(int(kind[0])))
        super()._build_tensors(start_offs, fields)


def _joined_rows(data: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor with eight rows as one, where it divides: the library goes sixteen rows at a time."""
    return data.reshape(len(data) // 8, -1) if data.ndim == 2 and len(data) % 8 == 0 else data


def _open(path: Path) -> Any:
    try:
        return _Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError, OSError, struct.error) as error:
        raise ModelError(f"{path}: damaged or not a GGUF file: {error}") from error


def _unknown_type(path: Path, name: str, kind: str) -> ModelError:
    return ModelError(f"{path}: tensor {name} has type {kind}, which cannot be dequantized")
