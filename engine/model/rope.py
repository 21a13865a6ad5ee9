"""Rotary position embedding. Source: RoFormer, arXiv:2104.09864."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvern.engine.model.config import RopeConfig, RopeScaling


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of dimensions: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    match config.scaling:
        case RopeScaling.NONE:
            return frequencies
        case RopeScaling.LINEAR:
            return frequencies / config.factor
        case RopeScaling.LLAMA3:
            return _scaled_as_llama3(frequencies, config)
        case RopeScaling.DIVISORS:
            return frequencies / torch.tensor(config.divisors, dtype=torch.float32)


def _scaled_as_llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Divide slow frequencies by the factor, leave fast ones, interpolate between. Source: the Llama 3.1 release."""
    context = config.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    slow = wavelengths > context / config.low_freq_factor
    fast = wavelengths < context / config.high_freq_factor
    smooth = (context / wavelengths - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    between = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    return torch.where(slow, frequencies / config.factor, torch.where(fast, frequencies, between))


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what `rotate` multiplies by at each position, the same for all heads.

    Two of [num_tokens, 1, head_dim]: the cosine, and the sine with the sign that it has in either half.
    """
    angles = (positions.to(torch.float32)[:, None] * frequencies)[:, None]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of each head against the second. heads: [num_tokens, num_heads, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cos, torch.cat((second, first), dim=-1), sin)
