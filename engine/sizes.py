"""How much memory a model's weights and KV take, from its configuration alone."""

from __future__ import annotations

from kvern.engine.model.config import ModelConfig, ModelShape

GPU_UTILIZATION = 0.9
"""Share of a GPU's memory that an engine fills unless told otherwise."""


def kv_block_bytes(model: ModelShape, block_size: int, element_bytes: int) -> int:
    """Return the bytes of one block over all layers, keys and values."""
    return model.num_layers * 2 * model.num_kv_heads * block_size * model.head_dim * element_bytes


def left_for_kv(total_bytes: int, share: float, used_bytes: int) -> int:
    """Return what a device's share leaves once weights and all else are in its memory. Negative: they do not fit."""
    return int(total_bytes * share) - used_bytes


def num_parameters(model: ModelConfig) -> int:
    """Return how many numbers the weights are, a head that is the embedding counted once."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    layers = sum(_layer_parameters(model, layer) for layer in range(model.num_layers))
    return embeddings + layers + model.hidden_size


def fp8_sizes(model: ModelConfig) -> tuple[int, int]:
    """Return how many of the parameters are fp8 where weights are quantized, and how many scales these have."""
    query_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    weights = 2 * model.hidden_size * (query_size + kv_size) + 3 * model.hidden_size * model.intermediate_size
    scales = query_size + 2 * kv_size + 2 * model.intermediate_size + 2 * model.hidden_size
    return model.num_layers * weights, model.num_layers * scales


def _layer_parameters(model: ModelConfig, layer: int) -> int:
    is_sparse = model.experts is not None and layer in model.experts.layers
    mlp = _expert_parameters(model) if is_sparse else _mlp_parameters(model)
    num_norms = 4 if model.sandwich_norms else 2
    return _attention_parameters(model) + mlp + num_norms * model.hidden_size


def _attention_parameters(model: ModelConfig) -> int:
    query_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    projections = 2 * model.hidden_size * (query_size + kv_size)
    biases = (query_size + 2 * kv_size) * model.attention_bias + model.hidden_size * model.attention_output_bias
    return projections + biases + 2 * model.head_dim * model.qk_norm


def _mlp_parameters(model: ModelConfig) -> int:
    biases = (2 * model.intermediate_size + model.hidden_size) * model.mlp_bias
    return 3 * model.hidden_size * model.intermediate_size + biases


def _expert_parameters(model: ModelConfig) -> int:
    assert model.experts is not None
    return model.experts.num_experts * model.hidden_size * (1 + 3 * model.experts.intermediate_size)
