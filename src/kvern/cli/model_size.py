"""A model's size from its configuration alone, without torch and without its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.engine.errors import ModelError
from kvern.engine.model.config import ModelShape
from kvern.engine.model.fields import Fields
from kvern.engine.model.hf_config import ARCHITECTURES, architecture_of, model_config_of
from kvern.engine.model.json_file import read_json
from kvern.engine.sizes import fp8_sizes, num_parameters
from kvern.services.runtime.gguf_metadata import GgufError, read_gguf_header
from kvern.services.runtime.model_source import ModelSource

_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Of a .gguf file: they are no weights of the model."""

_PROJECTION = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down))\.weight")
"""Of a .gguf file: what `--quantization fp8` puts in fp8."""

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What decides how much memory a model and its KV take."""

    shape: ModelShape
    num_heads: int
    num_parameters: int
    dtype: str | None
    """What the checkpoint says its weights are meant to run in. None: any."""
    has_fp8_weights: bool = False
    fp8_sizes: tuple[int, int] | None = None
    """How many of the parameters `--quantization fp8` puts in fp8, and how many scales they have. None: it cannot."""

    def weight_bytes(self, element_bytes: int, *, fp8: bool) -> int:
        """Return the bytes of all weights, of which those that are not in fp8 take `element_bytes` each."""
        if not fp8:
            return self.num_parameters * element_bytes
        assert self.fp8_sizes is not None
        weights, scales = self.fp8_sizes
        return (self.num_parameters - weights) * element_bytes + weights + scales * _SCALE_BYTES


def read_model_size(source: ModelSource) -> ModelSize:
    """Read a model's size. Raises ModelError."""
    if source.is_gguf:
        return _of_gguf(source)
    path = source.path / "config.json"
    return _of_config(read_json(path), str(path))


def _of_config(raw: Mapping[str, Any], source: str) -> ModelSize:
    architecture = architecture_of(raw, source)
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{source}: the size of a {architecture} cannot be told before it is loaded")
    config = model_config_of(raw, source)
    stated = raw.get("dtype") or raw.get("torch_dtype")
    dtype = None if stated is None else str(stated).removeprefix("torch.")
    sizes = fp8_sizes(config) if config.experts is None else None
    return ModelSize(config, config.num_heads, num_parameters(config), dtype, config.fp8_weights, sizes)


def _of_gguf(source: ModelSource) -> ModelSize:
    """The weights are what the file's tensors are."""
    try:
        header = read_gguf_header(source.path)
    except (GgufError, OSError) as error:
        raise ModelError(f"{source.path}: {error}") from error
    arch = str(header.metadata.get("general.architecture"))
    prefix = f"{arch}."
    named = {name.removeprefix(prefix): value for name, value in header.metadata.items() if name.startswith(prefix)}
    fields = Fields(named, f"{source.path}: {arch}")
    num_heads, num_layers = fields.integer("attention.head_count"), fields.integer("block_count")
    embedding = header.shapes.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{source.path}: tensor token_embd.weight is missing")
    shape = ModelShape(
        architecture=arch,
        vocab_size=embedding[-1],
        num_layers=num_layers,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=fields.integer("attention.key_length", fields.integer("embedding_length") // num_heads),
        max_position_embeddings=fields.integer("context_length"),
        sliding_windows=(None,) * num_layers,
    )
    parameters = sum(math.prod(shape) for name, shape in header.shapes.items() if name not in _ROPE_TENSORS)
    projections = [sizes for name, sizes in header.shapes.items() if _PROJECTION.fullmatch(name)]
    weights, scales = sum(math.prod(sizes) for sizes in projections), sum(sizes[-1] for sizes in projections)
    has_experts = f"{arch}.expert_count" in header.metadata
    return ModelSize(shape, num_heads, parameters, None, fp8_sizes=None if has_experts else (weights, scales))
