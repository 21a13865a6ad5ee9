"""The frame of a decoder-only model, which its ModelConfig fills in.

Module names are those of the checkpoints on Hugging Face.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvern.engine.model.attention import Step, distinct_ropes
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.decoder_layer import DecoderLayer, SandwichDecoderLayer
from kvern.engine.model.language_model import LanguageModel
from kvern.engine.model.layers import Embedding, Linear, make_norm
from kvern.engine.model.rope import RotaryEmbedding
from kvern.kernels.paged_attention import AttentionMetadata


class Decoder(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        make_layer = SandwichDecoderLayer if config.sandwich_norms else DecoderLayer
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.rotary_embeddings = nn.ModuleList(RotaryEmbedding(rope) for rope in distinct_ropes(config))
        self.layers = nn.ModuleList(make_layer(config, layer) for layer in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_size)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(token_ids)
        step = Step(attention, kv, [embedding(positions, x.dtype) for embedding in self.rotary_embeddings])
        for layer in self.layers:
            x = layer(x, step)
        out: Tensor = self.norm(x)
        return out


class CausalLM(LanguageModel):
    """A decoder and its head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.softcap = config.logit_softcap
        if config.tie_word_embeddings:
            self.tie()

    def tie(self) -> None:
        """Let the head be the embedding."""
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv: Tensor) -> Tensor:
        hidden: Tensor = self.model(token_ids, positions, attention, kv)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.to(torch.float32)
