"""A layer of experts, each token computed by those it was routed to. Source: Switch Transformers, arXiv:2101.03961."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvern.kernels.experts import grouped
from kvern.kernels.linear import linear


def experts(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    """Return the sum over a token's experts e of weight_e * down_e @ (silu(gate_e @ x) * (up_e @ x)).

    x: [num_tokens, hidden]; gate_up: [num_experts, 2 * intermediate, hidden], gates before ups; down: [num_experts,
    hidden, intermediate]; expert_ids: [num_tokens, top_k] int64, no expert twice; expert_weights: [num_tokens, top_k].
    Returns [num_tokens, hidden]. A token's sum is in the order of the experts, whoever else is in the batch.
    Raises ValueError for shapes that do not fit.
    """
    _check_shapes(x, gate_up, down, expert_ids, expert_weights)
    if x.is_cuda:
        return grouped.experts(x, gate_up, down, expert_ids, expert_weights)
    out = torch.zeros_like(x)
    order = expert_ids.flatten().argsort(stable=True)
    tokens = order // expert_ids.shape[1]
    weights = expert_weights.flatten()[order, None]
    begin = 0
    for expert, count in enumerate(expert_ids.flatten().bincount(minlength=len(gate_up)).tolist()):
        if count:
            part = slice(begin, begin + count)
            gate, up = linear(x[tokens[part]], gate_up[expert]).chunk(2, dim=-1)
            values = linear(functional.silu(gate) * up, down[expert])
            out.index_add_(0, tokens[part], (values * weights[part]).to(x.dtype))
            begin += count
    return out


def _check_shapes(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> None:
    num_experts, hidden_size, intermediate_size = down.shape
    if gate_up.shape != (num_experts, 2 * intermediate_size, hidden_size) or x.shape[1:] != (hidden_size,):
        raise ValueError(f"x {list(x.shape)}, gate_up {list(gate_up.shape)} and down {list(down.shape)} do not fit")
    if expert_ids.shape != expert_weights.shape or expert_ids.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"{len(x)} tokens, expert_ids {list(expert_ids.shape)} and expert_weights {list(expert_weights.shape)} "
            "do not fit"
        )
