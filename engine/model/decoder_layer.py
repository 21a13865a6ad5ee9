"""Decoder layers: attention, then MLP, each added to its input."""

from __future__ import annotations

from torch import Tensor

from kvern.engine.model.attention import Attention, Step
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.layers import Layer, make_norm
from kvern.engine.model.mlp import make_mlp


class DecoderLayer(Layer):
    """Normalizes what goes into attention and MLP. Source: Llama, arXiv:2302.13971."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.mlp = make_mlp(config, layer)

    def forward(self, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """Return what the layer adds last, and the sum of all before. The next norm adds the two."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, step), residual)
        return self.mlp(x, step), residual


class SandwichDecoderLayer(DecoderLayer):
    """Normalizes what goes into attention and MLP, and what comes out. Source: Gemma 2, arXiv:2408.00118."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.pre_feedforward_layernorm = make_norm(config, config.hidden_size)
        self.post_feedforward_layernorm = make_norm(config, config.hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        attended = self.post_attention_layernorm(self.self_attn(x, step))
        x, residual = self.pre_feedforward_layernorm.add(attended, residual)
        return self.post_feedforward_layernorm(self.mlp(x, step)), residual
