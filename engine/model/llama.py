"""Llama. Source: arXiv:2302.13971."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from kvern.engine.model.causal_lm import CausalLM, Step
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.layers import FusedLinear, Linear, RMSNorm
from kvern.engine.model.rope import rotate
from kvern.kernels.paged_attention import paged_attention, write_kv


class LlamaAttention(nn.Module):
    """Grouped-query attention over the paged KV cache."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, config.attention_bias)
        self.o_proj = Linear(query_size, config.hidden_size, config.attention_bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = rotate(heads[:, :num_rotated], step.cos, step.sin)
        q, k = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        write_kv(step.kv, self.layer, k, heads[:, num_rotated:], step.attention)
        attended = paged_attention(q, step.kv, self.layer, step.attention, self.scale)
        out: Tensor = self.o_proj(attended.view(len(x), -1))
        return out


class LlamaMLP(nn.Module):
    """(silu(x @ gate) * (x @ up)) @ down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(functional.silu(gate).mul_(up))
        return out


class LlamaDecoderLayer(nn.Module):
    """Attention, then MLP, each on normalized input and added to it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LlamaForCausalLM(CausalLM):
    """Hugging Face's LlamaForCausalLM, and llama.cpp's llama."""

    make_layer = LlamaDecoderLayer
