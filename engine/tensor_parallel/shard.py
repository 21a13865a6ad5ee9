"""Which part of a model one rank holds, and what ranks exchange while they run it.

Attention is shared out by heads, MLPs and experts by their intermediate size, the head by the vocabulary. Embedding,
norms and routing are on every rank. Where there are fewer KV heads than ranks, one is on several of them. So a layer
sums over the ranks twice: after attention and after the MLP. Source: Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, distributed
from torch.nn import functional

from kvern.engine.errors import ConfigError
from kvern.engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` ranks. All must call the same methods in the same order; alone, they change nothing."""

    rank: int = 0
    size: int = 1

    def sum(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors, in place. Every rank gets the same bits."""
        if self.size > 1:
            distributed.all_reduce(x)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Give every rank, in place, what rank 0 has."""
        if self.size > 1:
            distributed.broadcast(x, src=0)
        return x

    def minimum(self, number: int) -> int:
        """Return the least of the ranks' numbers."""
        if self.size == 1:
            return number
        least = torch.tensor(number)
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        return int(least)

    def join_vocabulary(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Put together what the ranks computed of `vocabulary`: [num_rows, own part] -> [num_rows, vocab_size]."""
        if self.size == 1:
            return logits
        own = functional.pad(logits, (0, self._vocabulary_width(vocab_size) - logits.shape[1])).contiguous()
        parts = own.new_empty(self.size, *own.shape)
        distributed.all_gather(list(parts), own)
        return parts.transpose(0, 1).reshape(len(logits), -1)[:, :vocab_size].contiguous()

    def vocabulary(self, vocab_size: int) -> slice:
        """Return the token ids whose logits this rank computes. Those of the last rank may be fewer."""
        width = self._vocabulary_width(vocab_size)
        return slice(min(self.rank * width, vocab_size), min((self.rank + 1) * width, vocab_size))

    def _vocabulary_width(self, vocab_size: int) -> int:
        return -(-vocab_size // self.size)


WHOLE = Shard()
"""Of a model that is on one device."""


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the shape of one shard. Raises ConfigError naming the sizes that would do."""
    if not _can_be_shared(config, shard.size):
        sizes = ", ".join(str(size) for size in range(1, config.num_heads + 1) if _can_be_shared(config, size))
        raise ConfigError(
            "tensor_parallel_size",
            f"{shard.size} ranks cannot share {config.num_heads} heads, {config.num_kv_heads} KV heads and MLPs of "
            f"{_listed(_mlp_sizes(config))} evenly; sizes that can are {sizes}",
        )
    experts = config.experts
    return replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=max(1, config.num_kv_heads // shard.size),
        intermediate_size=config.intermediate_size // shard.size,
        experts=experts and replace(experts, intermediate_size=experts.intermediate_size // shard.size),
    )


def _can_be_shared(config: ModelConfig, size: int) -> bool:
    kv_heads = config.num_kv_heads
    shares_kv = kv_heads % size == 0 or size % kv_heads == 0
    return shares_kv and not any(number % size for number in (config.num_heads, *_mlp_sizes(config)))


def _mlp_sizes(config: ModelConfig) -> list[int]:
    """Return the intermediate sizes that the layers have."""
    experts = config.experts
    if experts is None:
        return [config.intermediate_size]
    dense = [config.intermediate_size] if len(experts.layers) < config.num_layers else []
    return [*dense, experts.intermediate_size]


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
