"""Weights in the layout of what multiplies with them, made once, when a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvern.kernels.cpu import Argument, Operation

HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]

_TYPICAL_TOKENS = 64
"""How many tokens oneDNN's layout is made for. Others are multiplied with it too."""


class PackedWeight(Protocol):
    """A [out_features, in_features] weight, and the product with it."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Of memory that is held."""
        ...

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias. x: [num_tokens, in_features]; bias: [out_features]."""
        ...

    def operation(self, x: Argument, num_tokens: Argument, bias: Tensor | None, out: Argument) -> Operation | None:
        """Return the product as part of a program, in bfloat16, None where it cannot be one. x, out: addresses."""
        ...


class OneDnnWeight:
    """A weight on a CPU, its elements in the order that oneDNN reads them. Implements `PackedWeight`.

    The product has the bits that it has with the plain weight, which is brought into this order at every product.
    """

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_TOKENS)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return onednn_product(x, self._weight, bias)

    def operation(self, x: Argument, num_tokens: Argument, bias: Tensor | None, out: Argument) -> Operation | None:
        return None


def can_pack(weight: Tensor) -> bool:
    """Whether a plain weight had better be packed."""
    return HAS_ONEDNN and weight.device.type == "cpu" and weight.dtype is torch.bfloat16


def pack(weight: Tensor) -> PackedWeight:
    """Return a weight for which `can_pack` in the layout of what multiplies fastest with it."""
    try:
        from kvern.kernels.linear.bfloat import BFloatWeight
    except ModuleNotFoundError:  # no numba
        return OneDnnWeight(weight)
    return BFloatWeight(weight) if BFloatWeight.can_hold(weight) else OneDnnWeight(weight)


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, a row of which is the same bits in every batch. weight: plain, or in oneDNN's order.

    A lone row of float32 is given company: oneDNN sums it in another order.
    """
    if x.dtype is torch.float32 and len(x) == 1:
        return onednn_product(x.expand(2, -1), weight, bias)[:1]
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
