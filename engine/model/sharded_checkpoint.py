"""A checkpoint of which one rank sees its shard."""

from __future__ import annotations

import torch
from torch import Tensor

from kvern.engine.errors import ConfigError, ModelError
from kvern.engine.model.checkpoint import Checkpoint
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.hf_config import ARCHITECTURES
from kvern.engine.tensor_parallel.shard import Shard


class ShardedCheckpoint:
    """Implements `Checkpoint`. Tensors are the rank's parts, all else is of the whole model.

    Of safetensors, which are mapped into memory, no more is read than the part; a GGUF's tensors are dequantized whole.
    """

    def __init__(self, checkpoint: Checkpoint, shard: Shard) -> None:
        """Raises ConfigError for a model that only transformers can compute."""
        if checkpoint.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(
                "tensor_parallel_size", f"only {known} can be shared out; {checkpoint.architecture} runs on one device"
            )
        self.path, self.architecture = checkpoint.path, checkpoint.architecture
        self.weight_files = checkpoint.weight_files
        self._whole = checkpoint
        self._config = checkpoint.model_config()
        self._shard = shard

    def dtype(self) -> str | None:
        return self._whole.dtype()

    def model_config(self) -> ModelConfig:
        return self._config

    def eos_token_ids(self) -> frozenset[int]:
        return self._whole.eos_token_ids()

    def __contains__(self, name: str) -> bool:
        return name in self._whole

    def tensor(self, name: str) -> Tensor:
        try:
            return _part_of(name, self._whole.tensor(name), self._config, self._shard)
        except _Uneven as error:
            raise ModelError(f"{self.path}: tensor {name} {error}") from None

    def unread(self) -> list[str]:
        return self._whole.unread()


class _Uneven(Exception):
    """A tensor is not of the size that the config makes it."""


def _part_of(name: str, stored: Tensor, config: ModelConfig, shard: Shard) -> Tensor:
    layer, parameter = name.split(".")[-2:]
    kv_parts = min(shard.size, config.num_kv_heads)
    if stored.numel() == 1:
        return stored  # one scale of a whole tensor
    if parameter in ("k_scale", "v_scale"):
        return _narrow(stored, 0, shard, kv_parts)
    match layer:
        case "lm_head":
            return stored[shard.vocabulary(len(stored))]
        case "q_proj" | "gate_proj" | "up_proj":
            return _narrow(stored, 0, shard, shard.size)
        case "k_proj" | "v_proj":
            return _narrow(stored, 0, shard, kv_parts)
        case "qkv_proj":
            query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            return _narrow_each(stored, [query, kv, kv], shard, [shard.size, kv_parts, kv_parts])
        case "gate_up_proj":
            return _narrow_each(stored, [config.intermediate_size] * 2, shard, [shard.size] * 2)
        case "o_proj" | "down_proj" if parameter == "weight":
            return _narrow(stored, 1, shard, shard.size)
        case "o_proj" | "down_proj" if parameter == "bias" and shard.rank:
            return torch.zeros_like(stored)  # the sum over the ranks adds it once
    return stored


def _narrow(stored: Tensor, dim: int, shard: Shard, num_parts: int) -> Tensor:
    """Return the rank's part of a dimension. Where there are fewer parts than ranks, neighbours have the same one."""
    length, rest = divmod(stored.shape[dim], num_parts)
    if rest:
        raise _Uneven(f"is {list(stored.shape)}, which cannot be cut into {num_parts} equal parts")
    return stored.narrow(dim, shard.rank * num_parts // shard.size * length, length)


def _narrow_each(stored: Tensor, rows: list[int], shard: Shard, num_parts: list[int]) -> Tensor:
    """Return the rank's parts of tensors that are stored as one."""
    if sum(rows) != len(stored):
        raise _Uneven(f"is {list(stored.shape)}; the config wants {sum(rows)} rows")
    pieces = zip(torch.split(stored, rows), num_parts, strict=True)
    return torch.cat([_narrow(piece, 0, shard, parts) for piece, parts in pieces])
