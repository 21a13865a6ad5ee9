"""A .gguf file, its weights dequantized as they are read.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from kvern.engine.errors import ModelError
from kvern.engine.model.config import (
    Activation,
    DivisorScaling,
    LinearScaling,
    ModelConfig,
    RopeConfig,
    YarnScaling,
    checked,
)
from kvern.engine.model.fields import Fields
from kvern.engine.model.hf_rope import yarn_attention_factor

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_GEMMAS = ("gemma2", "gemma3")
_ROTATED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")
_EOS_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ROPE_DIVISORS = "rope_freqs.weight"
_LONGROPE_DIVISORS = "rope_factors_short.weight"


class GGUFCheckpoint:
    """Implements `Checkpoint`. The file is mapped into memory; a tensor is dequantized when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weight_files = [path]
        self._read: set[str] = set()
        reader = _open(path)
        self._metadata = reader.fields
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self._arch = self._text("general.architecture")
        if self._arch not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ModelError(f"{path}: architecture {self._arch!r} is not supported; {known} is")
        self.architecture = _ARCHITECTURES[self._arch]
        self._config = self._read_config()
        self._gguf_names = _names(self._arch, self._config.num_layers)

    def dtype(self) -> str | None:
        return None

    def model_config(self) -> ModelConfig:
        return self._config

    def eos_token_ids(self) -> frozenset[int]:
        fields = (self._metadata.get(f"tokenizer.ggml.{name}") for name in _EOS_FIELDS)
        return frozenset(int(field.contents()) for field in fields if field is not None)

    def __contains__(self, name: str) -> bool:
        return self._gguf_name(name) in self._tensors

    def tensor(self, name: str) -> Tensor:
        gguf_name = self._gguf_name(name)
        if gguf_name not in self._tensors:
            raise ModelError(f"{self.path}: tensor {gguf_name} ({name}) is missing")
        weights = self._dequantize(gguf_name)
        if self._arch == "llama" and gguf_name.endswith(_ROTATED):
            is_query = ".attn_q." in gguf_name
            weights = _unpermuted(weights, self._config.num_heads if is_query else self._config.num_kv_heads)
        if self._config.unit_offset_norms and gguf_name.endswith("norm.weight"):
            # llama.cpp adds the 1 when it converts a Gemma.
            weights = weights - 1
        return weights

    def unread(self) -> list[str]:
        return sorted(self._tensors.keys() - self._read)

    def _read_config(self) -> ModelConfig:
        prefix = f"{self._arch}."
        values = {name.removeprefix(prefix): field for name, field in self._metadata.items() if name.startswith(prefix)}
        fields = Fields({name: field.contents() for name, field in values.items()}, f"{self.path}: {self._arch}")
        if fields.integer("expert_count", 1) > 1:
            raise fields.error("expert_count", "a mixture of experts is not supported")
        hidden_size = fields.integer("embedding_length")
        num_heads = fields.integer("attention.head_count")
        num_layers = fields.integer("block_count")
        head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
        rope = self._rope_config(fields, head_dim)
        # llama.cpp writes 0 for a Phi-3 without a window.
        window = fields.values.get("attention.sliding_window") and fields.integer("attention.sliding_window")
        config = ModelConfig(
            architecture=self.architecture,
            vocab_size=self._vocab_size(),
            num_layers=num_layers,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=self._context_length(fields),
            sliding_windows=(window or None,) * num_layers,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("feed_forward_length"),
            num_heads=num_heads,
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            ropes=(rope,) * num_layers,
            attention_scale=head_dim**-0.5,
            tie_word_embeddings="output.weight" not in self._tensors,
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            attention_output_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self._tensors,
            fused_weights="blk.0.attn_qkv.weight" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
        )
        return checked(_as_gemma(config, fields) if self._arch in _GEMMAS else config, str(self.path))

    def _rope_config(self, fields: Fields, head_dim: int) -> RopeConfig:
        theta = fields.number("rope.freq_base", 10000.0)
        rotary_dim = fields.integer("rope.dimension_count", head_dim)
        if rotary_dim != head_dim and self._arch != "phi3":
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
        for name in (_ROPE_DIVISORS, _LONGROPE_DIVISORS):
            if name in self._tensors:
                divisors = tuple(self._dequantize(name).tolist())
                factor = fields.number("rope.scaling.attn_factor", 1.0)
                return RopeConfig(theta, rotary_dim, DivisorScaling(divisors), factor)
        return RopeConfig(theta, rotary_dim)

    def _context_length(self, fields: Fields) -> int:
        """Return the longest context. With LongRoPE, the one its first set of divisors is for."""
        trained = fields.integer("context_length")
        if _LONGROPE_DIVISORS not in self._tensors:
            return trained
        return fields.integer("rope.scaling.original_context_length", trained)

    def _vocab_size(self) -> int:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"{self.path}: tensor token_embd.weight is missing")
        return int(embedding.shape[-1])

    def _text(self, name: str) -> str:
        field = self._metadata.get(name)
        if field is None:
            raise ModelError(f"{self.path}: {name} is missing")
        return str(field.contents())

    def _gguf_name(self, name: str) -> str | None:
        gguf_name: str | None = self._gguf_names.get_name(name, try_suffixes=(".weight", ".bias"))
        return gguf_name

    def _dequantize(self, gguf_name: str) -> Tensor:
        tensor = self._tensors[gguf_name]
        self._read.add(gguf_name)
        try:
            weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise _unknown_type(self.path, gguf_name, tensor.tensor_type.name) from error
        return torch.from_numpy(weights)


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The library's reader, which does not say which tensor has a type it does not know."""

    data: Any

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path, "c")

    def _get(self, *args: Any, **kwargs: Any) -> Any:
        # A million slices are taken of a vocabulary; those of a memmap cost three times those of an array.
        self.data = np.asarray(self.data)
        return super()._get(*args, **kwargs)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, _, kind, _ = field.parts
            if int(kind[0]) not in gguf.GGML_QUANT_SIZES:
                raise _unknown_type(self._path, bytes(name).decode(), str(int(kind[0])))
        super()._build_tensors(start_offs, fields)


def _as_gemma(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Fill in what llama.cpp knows of Gemma without being told."""
    is_third = config.architecture == "Gemma3ForCausalLM"
    period, of_27b = (6, 62) if is_third else (2, 46)
    local = [(layer + 1) % period != 0 for layer in range(config.num_layers)]
    windows = zip(config.sliding_windows, local, strict=True)
    scaled_size = config.hidden_size // config.num_heads if config.num_layers == of_27b else config.head_dim
    local_rope = RopeConfig(fields.number("rope.freq_base_swa", 10000.0), config.head_dim)
    return replace(
        config,
        sliding_windows=tuple(window if is_local else None for window, is_local in windows),
        ropes=tuple(local_rope if is_third and is_local else config.ropes[0] for is_local in local),
        attention_scale=scaled_size**-0.5,
        activation=Activation.GELU_TANH,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        sandwich_norms=True,
        unit_offset_norms=True,
        embedding_scale=config.hidden_size**0.5,
    )


def _open(path: Path) -> Any:
    try:
        return _Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError, OSError) as error:
        raise ModelError(f"{path}: damaged or not a GGUF file: {error}") from error


def _unknown_type(path: Path, name: str, kind: str) -> ModelError:
    return ModelError(f"{path}: tensor {name} has type {kind}, which cannot be dequantized")


def _names(arch: str, num_layers: int) -> Any:
    """Return the library's map from Hugging Face's names to GGUF's."""
    keys = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(keys[arch], num_layers)


def _unpermuted(weights: Tensor, num_heads: int) -> Tensor:
    """Return query or key rows in the order in which a head's halves are rotated against each other.

    llama.cpp interleaves the two halves of each head when it converts a Llama, for it rotates neighbours.
    """
    half = weights.shape[0] // num_heads // 2
    pairs = weights.reshape(num_heads, half, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)
