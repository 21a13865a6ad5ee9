"""A config.json of Hugging Face's kind, read as a ModelConfig: one function for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvern.engine.errors import ModelError
from kvern.engine.model.config import Activation, ExpertsConfig, ModelConfig, checked
from kvern.engine.model.fields import Fields
from kvern.engine.model.hf_quantization import has_fp8_weights
from kvern.engine.model.hf_rope import longrope_config_of, rope_config_from, rope_config_of, rope_settings_of

Windows = tuple[int | None, ...]

_FULL, _SLIDING = "full_attention", "sliding_attention"


def architecture_of(raw: Mapping[str, Any], source: str) -> str:
    """Return the first of `architectures`. Raises ModelError."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(f"{source}: architectures names no model class")
    return str(architectures[0])


def model_config_of(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Return the shape that a config.json describes. Raises ModelError naming `source` and the field."""
    config = ARCHITECTURES[architecture_of(raw, source)](Fields(raw, source))
    return checked(replace(config, fp8_weights=has_fp8_weights(raw, source)), source)


def _frame(
    fields: Fields,
    *,
    theta: float = 10000.0,
    eps: float = 1e-6,
    head_dim: int | None = None,
    tied: bool = False,
    activation_field: str = "hidden_act",
    activation: Activation = Activation.SILU,
) -> ModelConfig:
    """Read what all architectures have. The keywords are what an absent field means."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", head_dim or hidden_size // num_heads)
    return ModelConfig(
        architecture=architecture_of(fields.values, fields.source),
        vocab_size=fields.integer("vocab_size"),
        num_layers=num_layers,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        sliding_windows=(None,) * num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        ropes=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
        activation=_activation(fields, activation_field, activation),
    )


def _rotated(config: ModelConfig, fields: Fields, theta: float = 10000.0) -> ModelConfig:
    """Give all layers the same rotary embedding."""
    return replace(config, ropes=(rope_config_of(fields, config.head_dim, theta),) * config.num_layers)


def _with_biases(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Take in the one flag for all of attention's biases."""
    bias = fields.flag("attention_bias")
    return replace(config, attention_bias=bias, attention_output_bias=bias)


def _llama(fields: Fields) -> ModelConfig:
    config = _with_biases(_rotated(_frame(fields), fields), fields)
    return replace(config, mlp_bias=fields.flag("mlp_bias"))


def _mistral(fields: Fields) -> ModelConfig:
    return _windowed(_rotated(_frame(fields), fields), fields, 4096)


def _qwen2(fields: Fields) -> ModelConfig:
    config = _rotated(_frame(fields), fields)
    return replace(config, attention_bias=True, sliding_windows=_upper_windows(fields, config.num_layers))


def _qwen3(fields: Fields) -> ModelConfig:
    config = _with_biases(_rotated(_frame(fields, head_dim=128), fields), fields)
    return replace(config, qk_norm=True, sliding_windows=_upper_windows(fields, config.num_layers))


def _qwen3_moe(fields: Fields) -> ModelConfig:
    config = _with_biases(_rotated(_frame(fields), fields), fields)
    if fields.flag("use_sliding_window"):
        config = _windowed(config, fields, 4096)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    layers = frozenset(layer for layer in range(config.num_layers) if layer not in dense and (layer + 1) % step == 0)
    experts = ExpertsConfig(
        layers=layers,
        num_experts=fields.integer("num_experts", fields.optional_integer("num_local_experts")),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
    )
    return replace(_with_silu(config, fields), qk_norm=True, experts=experts)


def _mixtral(fields: Fields) -> ModelConfig:
    config = _windowed(_rotated(_frame(fields, eps=1e-5), fields, 1e6), fields, None)
    experts = ExpertsConfig(
        layers=frozenset(range(config.num_layers)),
        num_experts=fields.integer("num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
    )
    return replace(_with_silu(config, fields), experts=experts)


def _smollm3(fields: Fields) -> ModelConfig:
    """Some layers do not encode positions."""
    config = _with_biases(_rotated(_frame(fields, tied=True), fields, 2e6), fields)
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.values.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(config.num_layers)]
    if not isinstance(rotated, list) or len(rotated) < config.num_layers:
        raise fields.error("no_rope_layers", f"an item for each of {config.num_layers} layers is needed")
    if fields.flag("use_sliding_window"):
        raise fields.error("use_sliding_window", "is not supported with layers that do not encode positions")
    ropes = tuple(rope if rotated[layer] else None for layer, rope in enumerate(config.ropes))
    return replace(config, ropes=ropes, mlp_bias=fields.flag("mlp_bias"))


def _phi3(fields: Fields) -> ModelConfig:
    config = _windowed(_frame(fields, eps=1e-5), fields, None)
    ropes = (longrope_config_of(fields, config.head_dim),) * config.num_layers
    return replace(config, ropes=ropes, fused_weights=True)


def _gemma(fields: Fields) -> ModelConfig:
    """Read what Gemma 2 and 3 share, all but the rope settings."""
    config = _frame(
        fields, head_dim=256, tied=True, activation_field="hidden_activation", activation=Activation.GELU_TANH
    )
    if fields.flag("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "is not supported")
    return replace(
        _with_biases(config, fields),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        sandwich_norms=True,
        unit_offset_norms=True,
        embedding_scale=config.hidden_size**0.5,
    )


def _gemma2(fields: Fields) -> ModelConfig:
    config = _rotated(_gemma(fields), fields)
    kinds = _layer_types(fields, config.num_layers) or _every_nth_full(2, config.num_layers)
    return replace(
        config,
        sliding_windows=_windows_of(kinds, fields.optional_integer("sliding_window", 4096)),
        attention_softcap=fields.optional_number("attn_logit_softcapping", 50.0),
        logit_softcap=fields.optional_number("final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields) -> ModelConfig:
    """Local and global layers are rotated differently."""
    config = _gemma(fields)
    pattern = fields.integer("sliding_window_pattern", 6)
    kinds = _layer_types(fields, config.num_layers) or _every_nth_full(pattern, config.num_layers)
    settings = rope_settings_of(fields)
    if not settings.keys() & {_FULL, _SLIDING}:
        settings = {_FULL: settings}
    local_theta = fields.number("rope_local_base_freq", 10000.0)
    local = {"rope_theta": local_theta} | dict(settings.get(_SLIDING) or {})
    ropes = {
        _FULL: rope_config_from(settings.get(_FULL) or {}, fields, config.head_dim, 1e6),
        _SLIDING: rope_config_from(local, fields, config.head_dim, local_theta),
    }
    return replace(
        config,
        qk_norm=True,
        ropes=tuple(ropes[kind] for kind in kinds),
        sliding_windows=_windows_of(kinds, fields.optional_integer("sliding_window", 4096)),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


ARCHITECTURES: dict[str, Callable[[Fields], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
    "Phi3ForCausalLM": _phi3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
"""By Hugging Face's names of the classes."""


def _activation(fields: Fields, name: str, default: Activation) -> Activation:
    value = fields.text(name, default.value)
    if value not in {activation.value for activation in Activation}:
        known = ", ".join(activation.value for activation in Activation)
        raise fields.error(name, f"{value!r} is not supported; {known} are")
    return Activation(value)


def _with_silu(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Return `config` if its experts can be computed."""
    if config.activation is not Activation.SILU:
        raise fields.error("hidden_act", f"{config.activation.value!r} is not supported for experts; silu is")
    return config


def _windowed(config: ModelConfig, fields: Fields, default: int | None) -> ModelConfig:
    """Give all layers the same window."""
    window = fields.optional_integer("sliding_window", default)
    return replace(config, sliding_windows=(window,) * config.num_layers)


def _upper_windows(fields: Fields, num_layers: int) -> Windows:
    """Return Qwen's windows, which are off unless asked for, and then on the layers from max_window_layers on."""
    window = fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    first = fields.values.get("max_window_layers", 28)
    kinds = _layer_types(fields, num_layers)
    if kinds is None:
        kinds = [_SLIDING if layer >= first else _FULL for layer in range(num_layers)]
    return _windows_of(kinds, window)


def _every_nth_full(n: int, num_layers: int) -> list[str]:
    return [_FULL if (layer + 1) % n == 0 else _SLIDING for layer in range(num_layers)]


def _layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    """Return what each layer attends, None where the config does not say."""
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) < num_layers or set(kinds) - {_FULL, _SLIDING}:
        raise fields.error("layer_types", f"{_FULL} or {_SLIDING} is needed for each of {num_layers} layers")
    return kinds[:num_layers]


def _windows_of(kinds: list[str], window: int | None) -> Windows:
    return tuple(window if kind == _SLIDING else None for kind in kinds)
