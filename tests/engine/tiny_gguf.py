"""Writes models of transformers' as .gguf files, as llama.cpp's convert_hf_to_gguf.py does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

Tensors = dict[str, np.ndarray[Any, Any]]

SUPERBLOCK = 256
_HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a superblock of a type that only llama.cpp writes has its half-precision numbers, in bytes."""

_LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.vocab_size": 97,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.eos_token_id": 2,
}


def gguf_tensors(model: Any, arch: str = "llama") -> Tensors:
    """Return a model's tensors under their names in a GGUF, in the order of its rows, with its norms' offset."""
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(key, model.config.num_hidden_layers)
    tensors = {}
    for hf_name, tensor in _with_separate_gates(model.state_dict()):
        if hf_name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        weights = tensor.numpy()
        if arch in ("llama", "smollm3") and ".attn_q." in name:
            weights = _permuted(weights, model.config.num_attention_heads)
        if arch in ("llama", "smollm3") and ".attn_k." in name:
            weights = _permuted(weights, model.config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            weights = weights + 1
        tensors[name] = weights
    return tensors


def _with_separate_gates(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Return tensors by name. transformers keeps the gates of all experts and their ups as one."""
    for name, tensor in state.items():
        if name.endswith(".experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}.weight"), half
        else:
            yield name.replace(".experts.down_proj", ".experts.down_proj.weight"), tensor


def with_separate_experts(tensors: Tensors) -> Tensors:
    """Return tensors as llama.cpp wrote them before it stacked experts."""
    stacked = {name: weights for name, weights in tensors.items() if "_exps." in name}
    return {name: weights for name, weights in tensors.items() if name not in stacked} | {
        name.replace("_exps.", f".{expert}."): part
        for name, weights in stacked.items()
        for expert, part in enumerate(weights)
    }


def random_blocks(kind: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a tensor of one of llama.cpp's own types, in random bytes, scales aside: [..., bytes]."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    generator = np.random.default_rng(len(kind) + shape[0])
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // SUPERBLOCK, size), dtype=np.uint8)
    for offset in _HALVES[kind]:
        scales = generator.uniform(1e-5, 2e-4, blocks.shape[:-1]).astype("<f2")
        blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _permuted(weights: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorder query or key rows so that neighbours are rotated against each other."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def metadata_of(model: Any, arch: str, **changes: Any) -> dict[str, Any]:
    """Return what a file says of a model, `changes` under the architecture's prefix included."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10000.0,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in values.items()}


def write_gguf(
    path: Path,
    tensors: Tensors,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    raw: dict[gguf.GGMLQuantizationType, Tensors] | None = None,
    **changes: Any,
) -> Path:
    """Write a file. Matrices are quantized. Those in `raw` are so already, and are written in the place of others.

    Two underscores of a change are a field's dot; None removes the field.
    """
    metadata = (metadata or _LLAMA) | {name.replace("__", "."): value for name, value in changes.items()}
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for name, value in metadata.items():
        if value is not None:
            add[type(value)](name, value)
    for kind, quantized in (raw or {}).items():
        tensors = {name: weights for name, weights in tensors.items() if name not in quantized}
        for name, rows in quantized.items():
            writer.add_tensor(name, rows, raw_dtype=kind)
    for name, weights in tensors.items():
        if weights.ndim == 1:
            writer.add_tensor(name, weights)
        else:
            writer.add_tensor(name, gguf.quantize(weights, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
