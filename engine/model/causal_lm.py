"""The frame of a decoder-only model, which its ModelConfig fills in.

Module names are those of the checkpoints on Hugging Face.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvern.engine.model.attention import Attention, Step, distinct_ropes
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.decoder_layer import DecoderLayer, SandwichDecoderLayer
from kvern.engine.model.language_model import LanguageModel
from kvern.engine.model.layers import Embedding, Linear, RMSNorm, make_norm
from kvern.engine.model.mlp import MLP, Experts, SparseMoE
from kvern.engine.model.ops import LayerOps
from kvern.engine.model.rope import RotaryEmbedding
from kvern.engine.tensor_parallel.shard import WHOLE, Shard
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
        residual: Tensor | None = None
        step = Step(attention, kv, [embedding(positions, x.dtype) for embedding in self.rotary_embeddings])
        for layer in self.layers:
            x, residual = layer(x, residual, step)
        return self.norm.add(x, residual)[0]


class CausalLM(LanguageModel):
    """A decoder and its head."""

    is_capturable = True

    def __init__(self, config: ModelConfig, shard: Shard = WHOLE) -> None:
        """config: of the shard. Of the head it has the rows of its part of the vocabulary."""
        super().__init__()
        self.model = Decoder(config)
        self.vocab_size, self.vocabulary = config.vocab_size, shard.vocabulary(config.vocab_size)
        self.lm_head = Linear(config.hidden_size, self.vocabulary.stop - self.vocabulary.start)
        self.softcap = config.logit_softcap
        self.shard = shard
        for module in self.modules():
            if isinstance(module, Attention | MLP | SparseMoE):
                module.shard = shard
        if config.tie_word_embeddings:
            self.tie()

    def use(self, ops: LayerOps) -> None:
        for module in self.modules():
            if isinstance(module, Attention | MLP | Experts | RMSNorm):
                module.ops = ops

    def tie(self) -> None:
        """Let the head be the embedding."""
        if self.shard.size == 1:
            self.lm_head.weight = self.model.embed_tokens.weight
        else:
            del self.lm_head.weight  # a view of a parameter is not one of its own
            self.lm_head.weight = self.head_rows_of_embedding()

    def head_rows_of_embedding(self) -> Tensor:
        """Return what a tied head is made of."""
        return self.model.embed_tokens.weight[self.vocabulary]

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv: Tensor) -> Tensor:
        hidden: Tensor = self.model(token_ids, positions, attention, kv)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.shard.join_vocabulary(self.lm_head(hidden), self.vocab_size)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.to(torch.float32)
