"""The container that a .gguf file is: metadata, and tensors that are dequantized as they are read.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
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
        try:
            weights = gguf.dequantize(tensor.data if part is None else tensor.data[part], tensor.tensor_type)
        except NotImplementedError as error:
            raise _unknown_type(self.path, name, tensor.tensor_type.name) from error
        return torch.from_numpy(weights)

    def unread(self) -> list[str]:
        """Return the names of the tensors that were never asked for."""
        return sorted(self._tensors.keys() - self._read)

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return self._tensors[name]


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The library's reader, which does not say which tensor has a type it does not know."""

    data: Any

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path, "c")

    def _get(self, *args: Any, **kwargs: Any) -> Any:
        # A million slices are taken of a vocabulary; those of a memmap cost three times those of an array.
        self.data = np.asarray(self.data)
        return super()._get(*args, **kwargs)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, _, kind, _ = field.parts
            if int(kind[0]) not in gguf.GGML_QUANT_SIZES:
                raise _unknown_type(self._path, bytes(name).decode(), str(int(kind[0])))
        super()._build_tensors(start_offs, fields)


def _open(path: Path) -> Any:
    try:
        return _Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError, OSError) as error:
        raise ModelError(f"{path}: damaged or not a GGUF file: {error}") from error


def _unknown_type(path: Path, name: str, kind: str) -> ModelError:
    return ModelError(f"{path}: tensor {name} has type {kind}, which cannot be dequantized")
