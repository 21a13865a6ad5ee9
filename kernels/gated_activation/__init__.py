"""The gated activation between the products of an MLP. Source: GLU variants, arXiv:2002.05202."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

__all__ = ["GatedActivation", "gated_activation"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GatedActivation(Enum):
    """What is made of the gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


def gated_activation(x: Tensor, activation: GatedActivation) -> Tensor:
    """Return activation(gate) * up, computed in float32.

    x: [num_tokens, 2 * size], gates before ups, rows contiguous. Returns [num_tokens, size] of the same type.
    Raises ValueError for shapes, strides or types that do not fit.
    """
    if x.dim() != 2 or x.shape[1] % 2 or x.dtype not in _DTYPES or x.stride(1) != 1:
        raise ValueError(
            f"x is {list(x.shape)} of {x.dtype}; [num_tokens, 2 * size] of a float type is needed, its rows contiguous"
        )
    # Imported here: a CPU does without Triton.
    from kvern.kernels.gated_activation.kernel import launch

    out = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype, device=x.device)
    if out.numel():
        launch(x, out, is_silu=activation is GatedActivation.SILU)
    return out
