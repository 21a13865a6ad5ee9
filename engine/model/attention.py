"""Attention of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvern.engine.model.config import ModelConfig, RopeConfig
from kvern.engine.model.layers import FusedLinear, Layer, Linear, make_norm
from kvern.engine.model.ops import TORCH_OPS, LayerOps
from kvern.engine.model.rope import Rotation
from kvern.engine.tensor_parallel.shard import WHOLE, Shard
from kvern.kernels.paged_attention import AttentionMetadata, paged_attention


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of a step shares."""

    attention: AttentionMetadata
    kv: Tensor
    """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
    rotations: list[Rotation]
    """One for each of `distinct_ropes`."""


def distinct_ropes(config: ModelConfig) -> list[RopeConfig]:
    """Return the rotary embeddings of a model, each once, in the order of the layers."""
    return list(dict.fromkeys(rope for rope in config.ropes if rope is not None))


class Attention(Layer):
    """Grouped-query attention over the paged KV cache."""

    ops: LayerOps = TORCH_OPS
    shard: Shard = WHOLE

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.sliding_window = config.sliding_windows[layer]
        rope = config.ropes[layer]
        self.rotation = None if rope is None else distinct_ropes(config).index(rope)
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, config.attention_bias, fp8=config.fp8_weights)
        self.o_proj = Linear(query_size, config.hidden_size, config.attention_output_bias, fp8=config.fp8_weights)
        self.q_norm = make_norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_dim) if config.qk_norm else None

    def forward(self, x: Tensor, step: Step) -> Tensor:
        heads = self.qkv_proj(x).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
            heads = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=1)
        rotation = None if self.rotation is None else step.rotations[self.rotation]
        q = self.ops.rotate_and_store(heads, self.num_heads, rotation, self.layer, step)
        attended = paged_attention(
            q,
            step.kv,
            self.layer,
            step.attention,
            self.scale,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
        )
        return self.shard.sum(self.o_proj(attended.flatten(1)))
