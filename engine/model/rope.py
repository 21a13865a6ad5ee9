"""Rotary position embedding. Source: RoFormer, arXiv:2104.09864."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kvern.engine.model.config import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)

Rotation = tuple[Tensor, Tensor]
"""What `rotate` multiplies by at each position, the same for all heads: two of [num_tokens, 1, rotary_dim], the cosine,
and the sine with the sign that it has in either half."""


class RotaryEmbedding(nn.Module):
    """[num_tokens] positions -> Rotation."""

    frequencies: Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.attention_factor = config.attention_factor
        self.register_buffer("frequencies", inverse_frequencies(config), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        angles = (positions.to(torch.float32)[:, None] * self.frequencies)[:, None]
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first half of each head's first rotary_dim dimensions against the second.

    heads: [num_tokens, num_heads, head_dim].
    """
    cos, sin = rotation
    rotary_dim = cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :rotary_dim], rotation), heads[..., rotary_dim:]), dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cos, torch.cat((second, first), dim=-1), sin)


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Return the angle per position of each pair of dimensions: [rotary_dim / 2] float32."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequencies = 1.0 / (config.theta**exponents)
    match config.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case DivisorScaling() | LongRopeScaling():
            return frequencies / torch.tensor(config.scaling.divisors, dtype=torch.float32)
        case Llama3Scaling():
            return _scaled_as_llama3(frequencies, config.scaling)
        case YarnScaling():
            return _scaled_as_yarn(frequencies, config.theta, config.scaling)


def _scaled_as_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide slow frequencies by the factor, leave fast ones, interpolate between."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    slow = wavelengths > context / scaling.low_freq_factor
    fast = wavelengths < context / scaling.high_freq_factor
    smooth = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return torch.where(slow, frequencies / scaling.factor, torch.where(fast, frequencies, between))


def _scaled_as_yarn(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Leave frequencies that turn more than beta_fast times in the first context, divide those below beta_slow."""
    low = _dimension_of_turns(scaling.beta_fast, len(frequencies), theta, scaling)
    high = _dimension_of_turns(scaling.beta_slow, len(frequencies), theta, scaling)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    places = torch.arange(len(frequencies), dtype=torch.float32)
    divided = ((places - low) / ((high - low) or 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * divided + frequencies * (1 - divided)


def _dimension_of_turns(turns: float, num_pairs: int, theta: float, scaling: YarnScaling) -> float:
    """Return which pair of dimensions, not rounded, turns that many times in the first context."""
    context = scaling.original_max_position_embeddings
    return num_pairs * math.log(context / (turns * 2 * math.pi)) / math.log(theta)
