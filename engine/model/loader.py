"""Loading a model: from files to a module that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from kvern.engine.config import EngineConfig
from kvern.engine.errors import ConfigError, ModelError
from kvern.engine.gpu_support import check_driver
from kvern.engine.model.causal_lm import CausalLM
from kvern.engine.model.checkpoint import Checkpoint
from kvern.engine.model.config import LongRopeScaling, ModelConfig, ModelShape, for_served_length
from kvern.engine.model.fingerprint import model_fingerprint
from kvern.engine.model.fp8_support import capability_of, check_fp8
from kvern.engine.model.fp8_weights import is_scale, scale_name, to_fp8
from kvern.engine.model.hf_config import ARCHITECTURES
from kvern.engine.model.integer_weights import INTEGER_BITS, check_sizes, pack_integers, with_integers
from kvern.engine.model.kv_scales import read_kv_scales
from kvern.engine.model.language_model import LanguageModel
from kvern.engine.model.layers import Fused, Linear
from kvern.engine.model.safetensors_checkpoint import SafetensorsCheckpoint
from kvern.engine.model.sharded_checkpoint import ShardedCheckpoint
from kvern.engine.tensor_parallel.shard import WHOLE, Shard, shard_config
from kvern.kernels.fp8_linear import FP8
from kvern.kernels.linear import can_pack, pack

logger = logging.getLogger(__name__)

Progress = Callable[[float, str], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HEAD = "lm_head.weight"
_SCALES = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
"""Of what a model's layers are given and cache, in fp8: not missed where it is rounded in another way."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, and what its files say of it."""

    module: LanguageModel
    config: ModelShape
    """Of the shard, where this is one of several."""
    path: Path
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: frozenset[int]
    fingerprint: str
    """Hex. Equal only where weights and shape are: see `model_fingerprint`."""
    quantization: str | None
    """fp8, int8 or int4: of layers' projections. None: they are in `dtype`."""
    kv_dtype: torch.dtype
    kv_scales: Tensor | None
    """[2, num_layers, num_kv_heads] float32, of KV in fp8: what keys and values are divided by."""
    num_parameters: int
    """Scales of weights in fp8 are not counted."""
    shard: Shard = WHOLE

    @property
    def weight_bytes(self) -> int:
        """Of memory that is held: a tied embedding counts twice where the head is packed."""
        packed = (layer.packed for layer in self.module.modules() if isinstance(layer, Linear))
        return sum(parameter.nbytes for parameter in self.module.parameters()) + sum(
            weight.nbytes for weight in packed if weight is not None
        )


def load_model(config: EngineConfig, progress: Progress | None = None, shard: Shard = WHOLE) -> LoadedModel:
    """Load the model at `config.model_path`, or one rank's shard of it.

    `progress` is told a share between 0 and 1 and what is being done.
    Raises ModelError where the files are missing, damaged or of a kind that cannot be run; ConfigError where dtype or
    device cannot be honoured.
    """
    report = progress or _no_progress
    device = _device(config.device, shard)
    report(0.0, "reading metadata")
    checkpoint = _open_checkpoint(config.model_path)
    if shard.size > 1:
        checkpoint = ShardedCheckpoint(checkpoint, shard)
    dtype = _dtype(config.dtype, checkpoint, device)
    kv_dtype = _kv_dtype(config.kv_cache_dtype, dtype, device)
    if checkpoint.architecture in ARCHITECTURES:
        module, shape, identity = _load_native(checkpoint, config, shard, dtype, device, report)
    else:
        module, shape, identity = _load_with_transformers(checkpoint, config, dtype, device, report)
    kv_scales = read_kv_scales(checkpoint, shape).to(device) if kv_dtype is FP8 else None
    num_parameters = sum(p.numel() for name, p in module.named_parameters() if not is_scale(name))
    _pack(module, shape)
    report(1.0, "loaded")
    return LoadedModel(
        module=module,
        config=shape,
        path=checkpoint.path,
        dtype=dtype,
        device=device,
        eos_token_ids=frozenset(i for i in checkpoint.eos_token_ids() if i < shape.vocab_size),
        fingerprint=model_fingerprint(identity, checkpoint.weight_files),
        quantization=_quantization_of(shape),
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        num_parameters=num_parameters,
        shard=shard,
    )


def _load_native(
    checkpoint: Checkpoint,
    asked: EngineConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    report: Progress,
) -> tuple[LanguageModel, ModelShape, str]:
    """Return the module, its shape, and all that its output depends on beside the weights."""
    config = for_served_length(checkpoint.model_config(), asked.max_model_len)
    config = _with_quantization(config, asked.quantization, device)
    _warn_of_long_divisors(checkpoint.path, config)
    if dtype is torch.float16 and config.unit_offset_norms:
        raise ConfigError("dtype", f"float16 overflows in {config.architecture}; bfloat16 and float32 do not")
    shape = shard_config(config, shard)
    module = _load_module(shape, checkpoint, shard, dtype, device, report)
    _warn_of_surplus(checkpoint.path, checkpoint.unread())
    return module, shape, repr(config)


def _with_quantization(config: ModelConfig, asked: str | None, device: torch.device) -> ModelConfig:
    """Return `config` with weights quantized as is asked for, or as is stored. Raises ConfigError."""
    if asked not in (None, "fp8", *INTEGER_BITS):
        raise ConfigError("quantization", f"{asked!r} is not one of fp8, {', '.join(INTEGER_BITS)}")
    if asked in INTEGER_BITS:
        return with_integers(config, asked, device)
    if asked is None and not config.fp8_weights:
        return config
    check_fp8("quantization", capability_of(device))
    if config.experts is not None:
        raise ConfigError("quantization", f"the experts of a {config.architecture} cannot be in fp8")
    return replace(config, fp8_weights=True)


def _quantization_of(shape: ModelShape) -> str | None:
    if not isinstance(shape, ModelConfig):
        return None
    if shape.integer_bits is not None:
        return f"int{shape.integer_bits}"
    return "fp8" if shape.fp8_weights else None


def _load_with_transformers(
    checkpoint: Checkpoint, asked: EngineConfig, dtype: torch.dtype, device: torch.device, report: Progress
) -> tuple[LanguageModel, ModelShape, str]:
    """As `_load_native`, with transformers' own code around our attention."""
    architecture, known = checkpoint.architecture, ", ".join(ARCHITECTURES)
    if asked.quantization is not None:
        refused = f"{architecture} is computed by transformers; only {known} can be in {asked.quantization}"
        raise ConfigError("quantization", refused)
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        raise ModelError(f"{checkpoint.path}: architecture {architecture} is not supported; {known} are")
    try:
        from kvern.engine.model.transformers_model import load_with_transformers
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{checkpoint.path}: architecture {architecture} needs the Python package {error.name}, which is not "
            f"installed; {known} do not"
        ) from error
    report(0.0, "loading with transformers")
    loaded = load_with_transformers(checkpoint, dtype, device)
    _warn_of_surplus(checkpoint.path, loaded.surplus)
    return loaded.module, loaded.shape, loaded.identity


def _open_checkpoint(path: Path) -> Checkpoint:
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: neither a directory with a config.json nor a .gguf file")
    try:
        from kvern.engine.model.gguf_checkpoint import GGUFCheckpoint
    except ModuleNotFoundError as error:
        raise ModelError(f"{path}: reading it needs the Python package {error.name}, which is not installed") from error
    return GGUFCheckpoint(path)


def _device(name: str, shard: Shard) -> torch.device:
    if name not in ("cpu", "auto", "cuda"):
        raise ConfigError("device", f"{name!r} is not one of auto, cpu, cuda")
    has_cuda = torch.cuda.is_available()
    if name != "cpu" and not has_cuda:
        check_driver()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    if name == "cuda" and not has_cuda:
        raise ConfigError("device", "no CUDA device is available to torch")
    if name == "cpu" or shard.size == 1:
        return torch.device(name)
    num_gpus = torch.cuda.device_count()
    if num_gpus < shard.size:
        raise ConfigError("tensor_parallel_size", f"{shard.size} ranks need as many GPUs; torch sees {num_gpus}")
    return torch.device("cuda", shard.rank)


def _dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError("dtype", f"{name!r} is not one of auto, {', '.join(_DTYPES)}")
        return _DTYPES[name]
    stated = checkpoint.dtype()
    if stated is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if stated not in _DTYPES:
        raise ModelError(f"{checkpoint.path}: weights of type {stated} are not supported; {', '.join(_DTYPES)} are")
    return _DTYPES[stated]


def _kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type of keys and values in the cache. `dtype`: of the activations."""
    if name == "auto":
        return dtype
    if name != "fp8":
        raise ConfigError("kv_cache_dtype", f"{name!r} is neither auto nor fp8")
    check_fp8("kv_cache_dtype", capability_of(device))
    if device.type == "cuda" and dtype is torch.float32:
        raise ConfigError("kv_cache_dtype", "fp8 on a GPU goes with a dtype of bfloat16 or float16, not with float32")
    return FP8


def _load_module(
    config: ModelConfig,
    checkpoint: Checkpoint,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    report: Progress,
) -> CausalLM:
    """Build the module and fill it.

    A head that is stored is used even where the config ties it to the embedding, as transformers does; where the two
    are equal, one is kept.
    """
    shared = config.tie_word_embeddings and _HEAD not in checkpoint
    if not shared and _HEAD not in checkpoint:
        raise ModelError(
            f"{checkpoint.path}: tensor {_HEAD} is missing, and the config does not tie it to the embedding"
        )
    with torch.device(device), _default_dtype(dtype):
        module = CausalLM(replace(config, tie_word_embeddings=shared), shard)
    if config.integer_bits is not None:
        check_sizes(module, config.integer_bits)
    _fill(dict(_parts(module, config.fused_weights)), checkpoint, report)
    if config.tie_word_embeddings and torch.equal(module.lm_head.weight, module.head_rows_of_embedding()):
        module.tie()
    return module


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fill(wanted: dict[str, Tensor], checkpoint: Checkpoint, report: Progress) -> None:
    """Copy every tensor that the module is made of out of the checkpoint, one at a time."""
    for done, (name, destination) in enumerate(wanted.items()):
        if is_scale(name):
            continue  # filled in with its weight
        report(done / len(wanted), f"loading {name}")
        source = checkpoint.tensor(name)
        if source.shape != destination.shape:
            expected = list(destination.shape)
            raise ModelError(f"{checkpoint.path}: tensor {name} is {list(source.shape)}; the config wants {expected}")
        if destination.dtype is FP8:
            source, scales = to_fp8(source.to(destination.device), name, checkpoint)
            wanted[scale_name(name)].copy_(scales)
        elif source.dtype is FP8:
            raise ModelError(f"{checkpoint.path}: tensor {name} is in fp8, which only layers' projections may be")
        destination.copy_(source)


def _pack(module: LanguageModel, shape: ModelShape) -> None:
    """Bring weights into the order that products read them in, one layer at a time."""
    if isinstance(shape, ModelConfig) and shape.integer_bits is not None:
        assert isinstance(module, CausalLM)
        return pack_integers(module, shape.integer_bits)
    for layer in module.modules():
        if isinstance(layer, Linear) and can_pack(layer.weight):
            layer.pack(pack)
    return None


def _parts(module: nn.Module, fused_weights: bool) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors that a checkpoint stores, by its names, as views of the module's parameters."""
    seen: set[Tensor] = set()
    for path, layer in module.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            if isinstance(layer, Fused) and not fused_weights:
                parent = path.rpartition(".")[0]
                yield from ((f"{parent}.{part}", view) for part, view in layer.parts_of(name))
            else:
                yield f"{path}.{name}", parameter


def _warn_of_surplus(path: Path, names: list[str]) -> None:
    names = [name for name in names if not name.endswith(_SCALES)]
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        logger.warning("%s: %d tensors are not part of the model and were left out: %s", path, len(names), shown)


def _warn_of_long_divisors(path: Path, config: ModelConfig) -> None:
    lengths = {
        rope.scaling.original_max_position_embeddings
        for rope in config.ropes
        if rope is not None and isinstance(rope.scaling, LongRopeScaling) and rope.scaling.is_long
    }
    for length in lengths:
        logger.warning(
            "%s: LongRoPE's factors for long contexts are used; a max_model_len of at most %d would use those for "
            "short ones, which serve these better",
            path,
            length,
        )


def _no_progress(share: float, what: str) -> None:
    """Tell nobody."""
