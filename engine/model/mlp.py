"""What follows attention in a decoder layer: one MLP, or experts of which each token takes some."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kvern.engine.model.attention import Step
from kvern.engine.model.config import ExpertsConfig, ModelConfig
from kvern.engine.model.layers import Fused, FusedLinear, Layer, Linear, empty_parameter
from kvern.engine.model.ops import TORCH_OPS, LayerOps
from kvern.engine.tensor_parallel.shard import WHOLE, Shard


class MLP(Layer):
    """(activation(x @ gate) * (x @ up)) @ down."""

    ops: LayerOps = TORCH_OPS
    shard: Shard = WHOLE

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, config.mlp_bias, fp8=config.fp8_weights)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, fp8=config.fp8_weights)
        self.activation = config.activation

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.shard.sum(self.down_proj(self.ops.gate(self.gate_up_proj(x), self.activation)))


class Experts(Fused):
    """MLPs without biases, their weights stacked. Checkpoints store each expert's own."""

    ops: LayerOps = TORCH_OPS

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = empty_parameter(config.num_experts, 2 * size, hidden_size)
        self.down_proj = empty_parameter(config.num_experts, hidden_size, size)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        return self.ops.experts(x, self.gate_up_proj, self.down_proj, expert_ids, expert_weights)

    def parts_of(self, parameter: str) -> Iterator[tuple[str, Tensor]]:
        names = ("gate_proj", "up_proj") if parameter == "gate_up_proj" else (parameter,)
        for expert, weights in enumerate(self.get_parameter(parameter)):
            for name, rows in zip(names, weights.chunk(len(names)), strict=True):
                yield f"experts.{expert}.{name}.weight", rows


class SparseMoE(Layer):
    """The experts that score highest, weighted by the softmax of their scores. Source: Mixtral, arXiv:2401.04088."""

    shard: Shard = WHOLE

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, experts.num_experts)
        self.experts = Experts(config.hidden_size, experts)
        self.top_k, self.norm_topk_prob = experts.top_k, experts.norm_topk_prob

    def forward(self, x: Tensor, step: Step) -> Tensor:
        probabilities = self.gate(x).softmax(dim=-1, dtype=torch.float32)
        weights, expert_ids = probabilities.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if step.attention.is_padding is not None:
            expert_ids = expert_ids.masked_fill(step.attention.is_padding[:, None], -1)
        return self.shard.sum(self.experts(x, expert_ids, weights))


def make_mlp(config: ModelConfig, layer: int) -> nn.Module:
    """Return what a layer computes after its attention: [num_tokens, hidden_size] -> the same."""
    if config.experts is not None and layer in config.experts.layers:
        return SparseMoE(config, config.experts)
    return MLP(config)
