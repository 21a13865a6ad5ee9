"""What the loader needs of a model's files, whatever their format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from kvern.engine.model.config import ModelConfig


class Checkpoint(Protocol):
    """A model on disk. Tensors go by Hugging Face's names. Every method may raise ModelError."""

    path: Path

    architecture: str
    """Hugging Face's name of the class."""

    weight_files: list[Path]

    def dtype(self) -> str | None:
        """Return the element type the weights are meant to run in. None: any."""
        ...

    def model_config(self) -> ModelConfig: ...

    def eos_token_ids(self) -> frozenset[int]: ...

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, on the CPU, in the type it is stored in or dequantized to."""
        ...

    def unread(self) -> list[str]:
        """Return the file's own names of the tensors that `tensor` was never asked for."""
        ...
