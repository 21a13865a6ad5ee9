"""A layer of experts on a GPU: products over tokens grouped by expert.

The sizes of all launches follow from shapes, so the host never waits. A token's result depends on nobody else: tiles
are the same for all batches, sums are in order of the experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    """Return the sum over a token's experts e of weight_e * down_e @ (silu(gate_e @ x) * (up_e @ x)).

    Shapes as in the launcher of the operation. expert_ids: -1 where a token fills up a batch; it takes part in nothing,
    and its row is 0. Sums are in float32, what lies between the products is rounded to x's type.
    Raises ValueError for strides or types that do not fit.
    """
    for name, tensor in (("x", x), ("gate_up", gate_up), ("down", down)):
        if tensor.dtype is not x.dtype or tensor.dtype not in _DTYPES or not tensor.is_contiguous():
            raise ValueError(f"{name} is of {tensor.dtype}; contiguous, and of the others' float type, is needed")
    if expert_ids.dtype is not torch.int64 or not expert_ids.is_contiguous():
        raise ValueError(f"expert_ids are of {expert_ids.dtype}; contiguous torch.int64 is needed")
    # Imported here: a CPU does without Triton.
    from kvern.kernels.experts.kernel import launch

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch(x, gate_up, down, expert_ids, expert_weights.to(torch.float32).contiguous(), out)
    return out
