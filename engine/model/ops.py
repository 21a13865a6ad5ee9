"""What layers are computed with beside matrix products: torch's own operations, or fused kernels. Chosen once at load.

On a CPU it is torch's, in bfloat16 compiled kernels. On a GPU, and wherever Triton was asked for, it is Triton's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvern.engine.model.config import Activation
from kvern.engine.model.rope import Rotation, rotate
from kvern.kernels.experts import experts, grouped
from kvern.kernels.gated_activation import GatedActivation, gated_activation
from kvern.kernels.paged_attention import write_kv
from kvern.kernels.rms_norm import add_rms_norm, rms_norm
from kvern.kernels.rotary_kv import rotary_kv

if TYPE_CHECKING:
    from kvern.engine.model.attention import Step

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
}


class LayerOps(Protocol):
    """A way to compute what layers are made of."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, or * (1 + weight)."""
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum."""
        ...

    def rotate_and_store(
        self, heads: Tensor, num_heads: int, rotation: Rotation | None, layer: int, step: Step
    ) -> Tensor:
        """Rotate queries and keys, store keys and values in the KV cache, and return the queries.

        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], those of queries, keys and values, contiguous.
        """
        ...

    def gate(self, x: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up. x: [num_tokens, 2 * size], gates before ups."""
        ...

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Return each token's sum over its experts. Shapes as in `kernels.experts`."""
        ...


class TorchOps:
    """torch's own operations, one after another. Implements `LayerOps`."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool) -> Tensor:
        if not unit_offset:
            return functional.rms_norm(x, weight.shape, weight, eps)
        weight = 1.0 + weight.to(torch.float32)
        return functional.rms_norm(x.to(torch.float32), weight.shape, weight, eps).to(x.dtype)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.norm(total, weight, eps, unit_offset=unit_offset), total

    def rotate_and_store(
        self, heads: Tensor, num_heads: int, rotation: Rotation | None, layer: int, step: Step
    ) -> Tensor:
        num_kv_heads = step.kv.shape[3]
        qk, v = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        if rotation is not None:
            qk = rotate(qk, rotation)
        write_kv(step.kv, layer, qk[:, num_heads:], v, step.attention)
        return qk[:, :num_heads]

    def gate(self, x: Tensor, activation: Activation) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gate).mul_(up)

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        return experts(x, gate_up, down, expert_ids, expert_weights)


class FusedOps:
    """Triton kernels. Implements `LayerOps`."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool) -> Tensor:
        return rms_norm(x, weight, eps, unit_offset=unit_offset)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps, unit_offset=unit_offset)

    def rotate_and_store(
        self, heads: Tensor, num_heads: int, rotation: Rotation | None, layer: int, step: Step
    ) -> Tensor:
        num_kv_heads, attention = step.kv.shape[3], step.attention
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        return rotary_kv(q, k, v, rotation, step.kv, layer, attention.slot_mapping, attention.kv_scales)

    def gate(self, x: Tensor, activation: Activation) -> Tensor:
        return gated_activation(x, GatedActivation[activation.name])

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        return grouped.experts(x, gate_up, down, expert_ids, expert_weights)


class CpuOps(TorchOps):
    """Kernels that numba compiles for bfloat16 on a CPU, which read and write memory once. Implements `LayerOps`.

    Raises ModuleNotFoundError without numba.
    """

    def __init__(self) -> None:
        from kvern.kernels.gated_activation import cpu as gated_activation
        from kvern.kernels.rms_norm import cpu as rms_norm
        from kvern.kernels.rotary_kv import cpu as rotary_kv

        self._norms, self._gates, self._rotations = rms_norm, gated_activation, rotary_kv

    def norm(self, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool) -> Tensor:
        return self._norms.rms_norm(x, weight, eps, unit_offset=unit_offset)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        return self._norms.add_rms_norm(x, residual, weight, eps, unit_offset=unit_offset)

    def rotate_and_store(
        self, heads: Tensor, num_heads: int, rotation: Rotation | None, layer: int, step: Step
    ) -> Tensor:
        if step.kv.dtype is not heads.dtype:
            return super().rotate_and_store(heads, num_heads, rotation, layer, step)
        return self._rotations.rotary_kv(heads, num_heads, rotation, step.kv, layer, step.attention.slot_mapping)

    def gate(self, x: Tensor, activation: Activation) -> Tensor:
        return self._gates.gated_activation(x, GatedActivation[activation.name])


TORCH_OPS: LayerOps = TorchOps()
FUSED_OPS: LayerOps = FusedOps()


def choose_ops(dtype: torch.dtype, *, device: torch.device, uses_triton: bool) -> LayerOps:
    """Return the fastest for activations of a type."""
    if uses_triton:
        return FUSED_OPS
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return TORCH_OPS
    try:
        return CpuOps()
    except ModuleNotFoundError:
        return TORCH_OPS
