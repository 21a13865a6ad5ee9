"""The rope settings of a config.json, read as a RopeConfig.

transformers 5 writes one object `rope_parameters`; before, there were `rope_theta` and `rope_scaling`, whose kind was
first called `type` and then `rope_type`. All are in use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvern.engine.errors import ModelError
from kvern.engine.model.config import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling
from kvern.engine.model.fields import Fields

_SPELLINGS = ("rope_parameters", "rope_scaling")


def rope_config_of(fields: Fields, head_dim: int, default_theta: float) -> RopeConfig:
    """Return the embedding that all layers share. `fields` are those of the config."""
    return rope_config_from(rope_settings_of(fields), fields, head_dim, default_theta)


def rope_settings_of(fields: Fields) -> Mapping[str, Any]:
    """Return what the config says under either name, an empty object where it says nothing."""
    settings: Any = next((fields.values[name] for name in _SPELLINGS if fields.values.get(name)), {})
    if not isinstance(settings, Mapping):
        raise ModelError(f"{fields.source}: the rope settings are no JSON object")
    return settings


def rope_config_from(settings: Mapping[str, Any], fields: Fields, head_dim: int, default_theta: float) -> RopeConfig:
    """Return the embedding of `settings`. What they leave out is beside them in the config, or a default."""
    beside = {name: fields.values.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    rope = Fields(beside | dict(settings), f"{fields.source}: rope settings")
    theta = rope.number("rope_theta", default_theta)
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "rotating only a part of each head is not supported here")
    match rope_kind(rope):
        case "default":
            return RopeConfig(theta, head_dim)
        case "linear":
            return RopeConfig(theta, head_dim, LinearScaling(rope.number("factor")))
        case "llama3":
            scaling = Llama3Scaling(
                rope.number("factor"),
                rope.number("low_freq_factor"),
                rope.number("high_freq_factor"),
                _original_length(rope, fields),
            )
            return RopeConfig(theta, head_dim, scaling)
        case "yarn":
            return _yarn(rope, fields, theta, head_dim)
    raise rope.error("rope_type", f"{rope_kind(rope)!r} is not supported; default, linear, llama3 and yarn are")


def rope_kind(rope: Fields) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def longrope_config_of(fields: Fields, head_dim: int) -> RopeConfig:
    """Return Phi-3's embedding, with the divisors for the length that the model was trained for."""
    beside = {name: fields.values.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    rope = Fields(beside | dict(rope_settings_of(fields)), f"{fields.source}: rope settings")
    theta = rope.number("rope_theta", 10000.0)
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", 1.0))
    kind = rope_kind(rope)
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    if kind not in ("longrope", "su", "yarn"):
        raise rope.error("rope_type", f"{kind!r} is not supported; default and longrope are")
    original = fields.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", 4096)
    )
    trained = fields.integer("max_position_embeddings")
    factor = rope.number("factor", trained / original)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (rope.numbers(name, rotary_dim // 2) for name in ("short_factor", "long_factor"))
    scaling = LongRopeScaling(short, long, original, is_long=trained > original)
    return RopeConfig(theta, rotary_dim, scaling, rope.number("attention_factor", attention_factor))


def _original_length(rope: Fields, fields: Fields) -> int:
    """Return the length of the model's first training. As in transformers, the config counts before its settings."""
    inner = rope.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))
    return fields.integer("original_max_position_embeddings", inner)


def _yarn(rope: Fields, fields: Fields, theta: float, head_dim: int) -> RopeConfig:
    original = _original_length(rope, fields)
    factor = rope.number("factor", fields.integer("max_position_embeddings") / original)
    scaling = YarnScaling(
        factor,
        original,
        rope.number("beta_fast", 32.0),
        rope.number("beta_slow", 1.0),
        rope.flag("truncate", True),
    )
    mscale, mscale_all_dim = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    if mscale is not None and mscale_all_dim is not None:
        attention_factor = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    else:
        attention_factor = yarn_attention_factor(factor)
    return RopeConfig(theta, head_dim, scaling, rope.number("attention_factor", attention_factor))


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
