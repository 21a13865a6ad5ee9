"""The frame of a decoder-only model. Architectures bring their layers.

Module names are those of the checkpoints on Hugging Face.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from kvern.engine.model.config import ModelConfig
from kvern.engine.model.layers import Embedding, Linear, RMSNorm
from kvern.engine.model.rope import inverse_frequencies, rotation
from kvern.kernels.paged_attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of a step shares."""

    attention: AttentionMetadata
    kv: Tensor
    """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
    cos: Tensor
    sin: Tensor
    """As `rotation` returns them."""


class DecoderLayer(Protocol):
    """Builds one layer, a module that takes hidden states and a Step and returns hidden states."""

    def __call__(self, config: ModelConfig, layer: int) -> nn.Module: ...


class Decoder(nn.Module):
    """Token ids to hidden states."""

    inverse_frequencies: Tensor

    def __init__(self, config: ModelConfig, make_layer: DecoderLayer) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(make_layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(token_ids)
        cos, sin = rotation(positions, self.inverse_frequencies, x.dtype)
        step = Step(attention, kv, cos, sin)
        for layer in self.layers:
            x = layer(x, step)
        out: Tensor = self.norm(x)
        return out


class CausalLM(nn.Module):
    """A decoder and its head. Tokens of all sequences lie one after another, without padding."""

    make_layer: ClassVar[DecoderLayer]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Decoder(config, type(self).make_layer)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.tie()

    def tie(self) -> None:
        """Let the head be the embedding."""
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv: Tensor) -> Tensor:
        """Write the tokens' KV and return their hidden states: [num_tokens, hidden_size].

        token_ids, positions: [num_tokens] int; kv: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        """
        hidden: Tensor = self.model(token_ids, positions, attention, kv)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] float32."""
        logits: Tensor = self.lm_head(hidden)
        return logits.to(torch.float32)
