"""A config.json of Hugging Face's kind, read as a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvern.engine.errors import ModelError
from kvern.engine.model.config import Fields, ModelConfig, RopeConfig, RopeScaling, checked

_DEFAULT_THETA = 10000.0
_DEFAULT_RMS_NORM_EPS = 1e-6


def architecture_of(raw: Mapping[str, Any], source: str) -> str:
    """Return the first of `architectures`. Raises ModelError."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(f"{source}: architectures names no model class")
    return str(architectures[0])


def model_config_of(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Return the shape that a config.json describes. Raises ModelError naming `source` and the field."""
    fields = Fields(raw, source)
    _refuse_what_is_not_run(raw, fields)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    max_position_embeddings = fields.integer("max_position_embeddings")
    config = ModelConfig(
        architecture=architecture_of(raw, source),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", _DEFAULT_RMS_NORM_EPS),
        rope=_rope_config(raw, source, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )
    return checked(config, source)


def _refuse_what_is_not_run(raw: Mapping[str, Any], fields: Fields) -> None:
    """Raise ModelError for settings that would silently change the output if they were ignored."""
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", f"{raw['hidden_act']!r} is not supported; silu is")
    if raw.get("quantization_config") is not None:
        raise fields.error("quantization_config", "quantized checkpoints are not supported, except .gguf files")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "rotating only a part of each head is not supported")


def _rope_config(raw: Mapping[str, Any], source: str, max_position_embeddings: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(f"{source}: the rope settings are no JSON object")
    fields = Fields(parameters, f"{source}: rope settings")
    theta = Fields({"rope_theta": raw.get("rope_theta"), **parameters}, source).number("rope_theta", _DEFAULT_THETA)
    kind = fields.text("rope_type", fields.text("type", RopeScaling.NONE.value))
    match kind:
        case RopeScaling.NONE.value:
            return RopeConfig(theta)
        case RopeScaling.LINEAR.value:
            return RopeConfig(theta, RopeScaling.LINEAR, factor=fields.number("factor"))
        case RopeScaling.LLAMA3.value:
            return RopeConfig(
                theta,
                RopeScaling.LLAMA3,
                factor=fields.number("factor"),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
                original_max_position_embeddings=fields.integer(
                    "original_max_position_embeddings", max_position_embeddings
                ),
            )
    raise fields.error("rope_type", f"{kind!r} is not supported; default, linear and llama3 are")
