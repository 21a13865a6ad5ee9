"""The metadata of a .gguf file, read as a ModelConfig: one function for each architecture.

llama.cpp knows some of each architecture without being told; its sources say what:
https://github.com/ggml-org/llama.cpp/tree/master/src/models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvern.engine.errors import ModelError
from kvern.engine.model.config import (
    Activation,
    DivisorScaling,
    ExpertsConfig,
    LinearScaling,
    LongRopeScaling,
    ModelConfig,
    RopeConfig,
    YarnScaling,
    checked,
)
from kvern.engine.model.fields import Fields
from kvern.engine.model.gguf_file import GGUFFile
from kvern.engine.model.hf_rope import yarn_attention_factor

_DIVISORS = "rope_freqs.weight"
_SHORT_DIVISORS, _LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"


def arch_of(file: GGUFFile) -> str:
    """Return llama.cpp's name of the architecture. Raises ModelError for one that is not read here."""
    arch = file.text("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ModelError(f"{file.path}: architecture {arch!r} is not supported; {', '.join(_ARCHITECTURES)} are")
    return arch


def model_config_of(file: GGUFFile) -> ModelConfig:
    """Return the shape that the metadata describe. Raises ModelError naming file and field."""
    arch = arch_of(file)
    fields = file.fields(arch)
    config = _ARCHITECTURES[arch](file, fields)
    if config.experts is None and fields.values.get("expert_count"):
        raise fields.error("expert_count", "experts are supported in the architectures llama and qwen3moe only")
    return checked(config, str(file.path))


def _frame(file: GGUFFile, fields: Fields, architecture: str) -> ModelConfig:
    """Read what all architectures have."""
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    num_layers = fields.integer("block_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    # llama.cpp writes 0 for a Phi-3 without a window.
    window = fields.values.get("attention.sliding_window") and fields.integer("attention.sliding_window")
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.shape("token_embd.weight")[0],
        num_layers=num_layers,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("context_length"),
        sliding_windows=(window or None,) * num_layers,
        hidden_size=hidden_size,
        # A file of experts alone may leave out the width of an MLP that it does not have.
        intermediate_size=fields.integer("feed_forward_length", fields.optional_integer("expert_feed_forward_length")),
        num_heads=num_heads,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        ropes=(_rope_config(file, fields, head_dim),) * num_layers,
        attention_scale=head_dim**-0.5,
        tie_word_embeddings="output.weight" not in file,
        attention_bias="blk.0.attn_q.bias" in file,
        attention_output_bias="blk.0.attn_output.bias" in file,
        mlp_bias="blk.0.ffn_gate.bias" in file,
        fused_weights="blk.0.attn_qkv.weight" in file,
        qk_norm="blk.0.attn_q_norm.weight" in file,
    )


def _llama(file: GGUFFile, fields: Fields) -> ModelConfig:
    """A Mixtral is a Llama with experts to llama.cpp."""
    config = _frame(file, fields, "LlamaForCausalLM")
    if not fields.values.get("expert_count"):
        return config
    experts = _experts(fields, config.num_layers, config.intermediate_size)
    return replace(config, architecture="MixtralForCausalLM", experts=experts)


def _qwen3_moe(file: GGUFFile, fields: Fields) -> ModelConfig:
    config = _frame(file, fields, "Qwen3MoeForCausalLM")
    size = fields.integer("expert_feed_forward_length", config.intermediate_size // fields.integer("expert_used_count"))
    return replace(config, experts=_experts(fields, config.num_layers, size))


def _experts(fields: Fields, num_layers: int, intermediate_size: int) -> ExpertsConfig:
    """Return experts in every layer, their weights normalized: llama.cpp computes no others here."""
    return ExpertsConfig(
        layers=frozenset(range(num_layers)),
        num_experts=fields.integer("expert_count"),
        top_k=fields.integer("expert_used_count"),
        intermediate_size=intermediate_size,
        norm_topk_prob=True,
    )


def _smollm3(file: GGUFFile, fields: Fields) -> ModelConfig:
    """Every fourth layer does not encode positions."""
    config = _frame(file, fields, "SmolLM3ForCausalLM")
    ropes = tuple(None if (layer + 1) % 4 == 0 else rope for layer, rope in enumerate(config.ropes))
    return replace(config, ropes=ropes)


def _gemma(config: ModelConfig, fields: Fields, period: int, num_layers_of_27b: int) -> ModelConfig:
    """Fill in what Gemma 2 and 3 share. Every `period`th layer is global, the others are local."""
    period = fields.integer("attention.sliding_window_pattern", period)
    windows = tuple(
        None if (layer + 1) % period == 0 else window for layer, window in enumerate(config.sliding_windows)
    )
    is_27b = config.num_layers == num_layers_of_27b
    scaled_size = config.hidden_size // config.num_heads if is_27b else config.head_dim
    return replace(
        config,
        sliding_windows=windows,
        attention_scale=scaled_size**-0.5,
        activation=Activation.GELU_TANH,
        sandwich_norms=True,
        unit_offset_norms=True,
        embedding_scale=config.hidden_size**0.5,
    )


def _gemma2(file: GGUFFile, fields: Fields) -> ModelConfig:
    config = _frame(file, fields, "Gemma2ForCausalLM")
    window = fields.integer("attention.sliding_window", 4096)
    config = replace(config, sliding_windows=(window,) * config.num_layers)
    return replace(
        _gemma(config, fields, period=2, num_layers_of_27b=46),
        attention_softcap=fields.number("attn_logit_softcapping", 50.0),
        logit_softcap=fields.number("final_logit_softcapping", 30.0),
    )


def _gemma3(file: GGUFFile, fields: Fields) -> ModelConfig:
    """Local and global layers are rotated differently."""
    config = _gemma(_frame(file, fields, "Gemma3ForCausalLM"), fields, period=6, num_layers_of_27b=62)
    local = RopeConfig(fields.number("rope.freq_base_swa", 10000.0), config.head_dim)
    ropes = (
        rope if window is None else local for rope, window in zip(config.ropes, config.sliding_windows, strict=True)
    )
    return replace(config, ropes=tuple(ropes), logit_softcap=fields.optional_number("final_logit_softcapping"))


_ARCHITECTURES: dict[str, Callable[[GGUFFile, Fields], ModelConfig]] = {
    "llama": _llama,
    "qwen2": partial(_frame, architecture="Qwen2ForCausalLM"),
    "qwen3": partial(_frame, architecture="Qwen3ForCausalLM"),
    "qwen3moe": _qwen3_moe,
    "smollm3": _smollm3,
    "phi3": partial(_frame, architecture="Phi3ForCausalLM"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""By llama.cpp's names."""


def _rope_config(file: GGUFFile, fields: Fields, head_dim: int) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and arch_of(file) != "phi3":
        raise fields.error("rope.dimension_count", "rotating only a part of each head is not supported")
    kind = fields.text("rope.scaling.type", "none")
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, LinearScaling(fields.number("rope.scaling.factor")))
    if kind == "yarn":
        factor = fields.number("rope.scaling.factor")
        scaling = YarnScaling(factor, fields.integer("rope.scaling.original_context_length"))
        return RopeConfig(theta, rotary_dim, scaling, yarn_attention_factor(factor))
    if kind not in ("none", "longrope"):
        raise fields.error("rope.scaling.type", f"{kind!r} is not supported; none, linear, longrope and yarn are")
    return _divided(file, fields, RopeConfig(theta, rotary_dim))


def _divided(file: GGUFFile, fields: Fields, rope: RopeConfig) -> RopeConfig:
    """Take in divisors that are stored as tensors, LongRoPE's two lists or the one of a Llama 3."""
    factor = fields.number("rope.scaling.attn_factor", 1.0)
    if _DIVISORS in file:
        return replace(rope, scaling=DivisorScaling(_numbers(file, _DIVISORS)), attention_factor=factor)
    if _SHORT_DIVISORS not in file and _LONG_DIVISORS not in file:
        return rope
    trained = fields.integer("context_length")
    original = fields.integer("rope.scaling.original_context_length", trained)
    short, long = _numbers(file, _SHORT_DIVISORS), _numbers(file, _LONG_DIVISORS)
    return replace(
        rope, scaling=LongRopeScaling(short, long, original, is_long=trained > original), attention_factor=factor
    )


def _numbers(file: GGUFFile, name: str) -> tuple[float, ...]:
    return tuple(file.dequantize(name).tolist())
