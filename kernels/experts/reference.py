"""The definition of a layer of experts, slow and plain: what every backend is tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def experts(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    """Return each token's weighted sum over its experts, in float64. Shapes are those of the launcher."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, ids in enumerate(expert_ids.tolist()):
        for place, expert in enumerate(ids):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            value = down[expert].double() @ (gate * torch.sigmoid(gate) * up)
            out[token] += expert_weights[token, place].double() * value
    return out
