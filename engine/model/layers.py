"""Layers that decoder-only models are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvern.engine.model.config import ModelConfig
from kvern.kernels.linear import linear


def empty_parameter(*shape: int) -> nn.Parameter:
    """Return a parameter whose values the loader fills in."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """[num_tokens, in_features] -> [num_tokens, out_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Fused(nn.Module):
    """A module whose parameters most checkpoints store in parts."""

    def parts_of(self, parameter: str) -> Iterator[tuple[str, Tensor]]:
        """Return the parts of one parameter as views, each with its name beside this module."""
        raise NotImplementedError


class FusedLinear(Linear, Fused):
    """Several linear layers over one input, computed as one product."""

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False) -> None:
        """parts: name in the checkpoint, beside this layer's own, to output features."""
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = dict(parts)

    def parts_of(self, parameter: str) -> Iterator[tuple[str, Tensor]]:
        split = torch.split(self.get_parameter(parameter), list(self.parts.values()))
        for part, rows in zip(self.parts, split, strict=True):
            yield f"{part}.{parameter}", rows


class Embedding(nn.Module):
    """[num_tokens] ids -> [num_tokens, hidden_size], times the scale in the weight's own precision."""

    scale: Tensor

    def __init__(self, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size)
        self.is_scaled = scale != 1.0
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        embedded = functional.embedding(token_ids, self.weight)
        return embedded * self.scale if self.is_scaled else embedded


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, with the mean in float32. Source: arXiv:1910.07467."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class UnitOffsetRMSNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps) * (1 + weight), in float32. Source: the Gemma release."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.to(torch.float32)
        return functional.rms_norm(x.to(torch.float32), weight.shape, weight, self.eps).to(x.dtype)


def make_norm(config: ModelConfig, size: int) -> RMSNorm:
    """Return a norm over `size` elements, of the model's kind."""
    return (UnitOffsetRMSNorm if config.unit_offset_norms else RMSNorm)(size, config.rms_norm_eps)
