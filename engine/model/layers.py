"""Layers that decoder-only models are made of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvern.kernels.linear import linear


def _empty(*shape: int) -> nn.Parameter:
    """Return a parameter whose values the loader fills in."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """[num_tokens, in_features] -> [num_tokens, out_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = _empty(out_features, in_features)
        self.bias = _empty(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Several linear layers over one input, computed as one product. Checkpoints store the parts."""

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False) -> None:
        """parts: name in the checkpoint, beside this layer's own, to output features."""
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = dict(parts)


class Embedding(nn.Module):
    """[num_tokens] ids -> [num_tokens, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = _empty(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, with the mean in float32. Source: arXiv:1910.07467."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = _empty(hidden_size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
