"""Layers that decoder-only models are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvern.engine.errors import ConfigError
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.ops import TORCH_OPS, LayerOps
from kvern.kernels.fp8_linear import FP8, MULTIPLE, fp8_linear
from kvern.kernels.linear import PackedWeight, linear


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a parameter whose values the loader fills in."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Layer(nn.Module):
    """A module without hooks, called as fast as a function. A step of a small model makes 200 such calls."""

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)


class Linear(Layer):
    """[num_tokens, in_features] -> [num_tokens, out_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False, *, fp8: bool = False) -> None:
        """fp8: hold the weight in float8_e4m3fn. Raises ConfigError for sizes that a GPU cannot multiply then."""
        super().__init__()
        if fp8 and (in_features % MULTIPLE or out_features % MULTIPLE):
            sizes = f"a layer of {in_features} inputs and {out_features} outputs"
            raise ConfigError("quantization", f"{sizes} cannot be in fp8, where both must divide by {MULTIPLE}")
        self.weight: Tensor = empty_parameter(out_features, in_features, dtype=FP8 if fp8 else None)
        self.weight_scale = empty_parameter(out_features, 1, dtype=torch.float32) if fp8 else None
        self.bias = empty_parameter(out_features) if bias else None
        self.packed: PackedWeight | None = None

    def pack(self, pack: Callable[[Tensor], PackedWeight]) -> None:
        """Hold the weight as what is made of it, and no longer as a parameter. A tied embedding keeps its own."""
        self.packed = pack(self.weight)
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.product(x, self.bias)
        if self.weight_scale is not None:
            return fp8_linear(x, self.weight, self.weight_scale, self.bias)
        return linear(x, self.weight, self.bias)


class Fused(Layer):
    """A module whose parameters most checkpoints store in parts."""

    def parts_of(self, parameter: str) -> Iterator[tuple[str, Tensor]]:
        """Return the parts of one parameter as views, each with its name beside this module."""
        raise NotImplementedError


class FusedLinear(Linear, Fused):
    """Several linear layers over one input, computed as one product."""

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False, *, fp8: bool = False) -> None:
        """parts: name in the checkpoint, beside this layer's own, to output features."""
        super().__init__(in_features, sum(parts.values()), bias, fp8=fp8)
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


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * weight, with the mean in float32. Source: arXiv:1910.07467.

    With a unit offset it is * (1 + weight). Source: the Gemma release.
    """

    ops: LayerOps = TORCH_OPS

    def __init__(self, size: int, eps: float, *, unit_offset: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps, self.unit_offset = eps, unit_offset

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.weight, self.eps, unit_offset=self.unit_offset)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum, and the sum. None: there is nothing to add so far."""
        if residual is None:
            return self(x), x
        return self.ops.add_norm(x, residual, self.weight, self.eps, unit_offset=self.unit_offset)


def make_norm(config: ModelConfig, size: int) -> RMSNorm:
    """Return a norm over `size` elements, of the model's kind."""
    return RMSNorm(size, config.rms_norm_eps, unit_offset=config.unit_offset_norms)
