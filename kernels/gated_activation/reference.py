"""The definition of the gated activation: what the kernel is tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvern.kernels.gated_activation import GatedActivation


def gated_activation(x: Tensor, activation: GatedActivation) -> Tensor:
    """Return activation(gate) * up, computed in float32."""
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    if activation is GatedActivation.SILU:
        return (functional.silu(gate) * up).to(x.dtype)
    return (functional.gelu(gate, approximate="tanh") * up).to(x.dtype)
