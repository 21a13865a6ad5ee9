"""`kvern capacity`: what fits beside a model's weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvern.cli.model_size import ModelSize, read_model_size
from kvern.engine.config import EngineConfig
from kvern.engine.errors import ModelError
from kvern.engine.sizes import GPU_UTILIZATION, kv_block_bytes, left_for_kv
from kvern.engine.summary import Capacity, readable_bytes
from kvern.services.runtime.model_source import ModelNotFound, ModelSource, find_model

GPU_GIGABYTES = {
    "a10": 24, "l4": 24, "a100-40gb": 40, "l40s": 48, "a100-80gb": 80, "h100": 80, "h200": 141, "b200": 180
}  # fmt: skip
"""Memory by the vendor's data sheets, in powers of ten. Drivers report as much or up to 7 % more."""

CONTEXT_BYTES = 512 << 20
"""What CUDA and its libraries take of a GPU before there is any tensor. An estimate: versions differ."""

_DEFAULTS = EngineConfig(model_path=Path())
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FP8 = "float8_e4m3fn"
_KV_BYTES = _ELEMENT_BYTES | {_FP8: 1}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{prefix}i": 1 << (10 * power) for power, prefix in enumerate("kmgt", start=1)
}


def _byte_count(value: str) -> int:
    """Read bytes, with a suffix if you like."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?i?)b?", value.lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise click.BadParameter(f"{value!r} is no number of bytes such as 512MiB or 80GB")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, slots=True)
class Asked:
    """The options."""

    gpu: str | None
    gpu_memory: int | None
    gpu_memory_utilization: float
    kv_cache_memory: int | None
    tensor_parallel: int
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    block_size: int
    max_model_len: int | None
    context: int

    @property
    def total_bytes(self) -> int | None:
        """Of each GPU; None where none is named."""
        return self.gpu_memory if self.gpu is None else GPU_GIGABYTES[self.gpu] * 10**9

    @property
    def device(self) -> str:
        if self.total_bytes is None:
            return "cpu"
        name = self.gpu or "a GPU"
        return name if self.tensor_parallel == 1 else f"each of {self.tensor_parallel} ({name})"


@click.command()
@click.argument("model")
@click.option("--gpu", type=click.Choice([*GPU_GIGABYTES]), help="A GPU by name.")
@click.option(
    "--gpu-memory", type=_byte_count, metavar="BYTES", help="Memory of a GPU that has no name here, such as 16GiB."
)
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    default=GPU_UTILIZATION,
    show_default=True,
    help="Share of it to fill.",
)
@click.option(
    "--kv-cache-memory", type=_byte_count, metavar="BYTES", help="Memory for KV, instead of what is left of the GPU's."
)
@click.option(
    "--tensor-parallel", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs that share a replica."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", *_ELEMENT_BYTES]),
    default="auto",
    show_default=True,
    help="Type of weights and KV. auto: the checkpoint's; a GGUF runs in bfloat16 on a GPU, in float32 on a CPU.",
)
@click.option("--quantization", type=click.Choice(["fp8"]), help="Layers' projections in 8 bits.")
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(["auto", "fp8"]),
    default="auto",
    show_default=True,
    help="Type of KV. auto: the dtype.",
)
@click.option(
    "--block-size", type=click.IntRange(1, 256), default=_DEFAULTS.block_size, show_default=True, help="Tokens."
)
@click.option("--max-model-len", type=click.IntRange(min=2), help="Longest request. [default: the model's]")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Tokens of a usual request, prompt and output.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def capacity(model: str, as_json: bool, **options: Any) -> None:
    """Say how many tokens and requests fit beside MODEL's weights.

    MODEL is a Hugging Face folder, of which config.json is enough, a .gguf file, smollm2, or a hub id (owner/name), of
    which no weights are fetched. An engine that starts with these settings prints the same numbers.
    """
    asked = Asked(**options)
    if asked.total_bytes is None and asked.kv_cache_memory is None:
        raise click.UsageError("how much memory? --gpu, --gpu-memory or --kv-cache-memory")
    source = _found(model)
    try:
        size = read_model_size(source)
    except ModelError as error:
        raise click.ClickException(str(error)) from error
    planned = plan(source, _on_each(size, asked.tensor_parallel), asked)
    if as_json:
        click.echo(json.dumps(_as_dict(planned, asked.context)))
        return
    for line in (*planned.memory_lines(), *_lines(planned, asked)):
        click.echo(line)


def _found(model: str) -> ModelSource:
    try:
        return find_model(model, weights=False)
    except ModelNotFound as error:
        raise click.ClickException(str(error)) from error
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"hub ids need the services ({error.name} is missing): pip install 'kvern[services]'"
        ) from error


def _on_each(size: ModelSize, num_gpus: int) -> ModelSize:
    """Return what each of several GPUs holds: its heads, and its part of all matrices. Norms are neglected."""
    if num_gpus == 1:
        return size
    kv_heads = size.shape.num_kv_heads
    if size.num_heads % num_gpus or (kv_heads % num_gpus and num_gpus % kv_heads):
        raise click.ClickException(
            f"--tensor-parallel: {num_gpus} GPUs cannot share {size.num_heads} heads and {kv_heads} KV heads evenly"
        )
    shape = replace(size.shape, num_kv_heads=max(1, kv_heads // num_gpus))
    fp8_sizes = size.fp8_sizes and (size.fp8_sizes[0] // num_gpus, -(-size.fp8_sizes[1] // num_gpus))
    return replace(size, shape=shape, num_parameters=-(-size.num_parameters // num_gpus), fp8_sizes=fp8_sizes)


def plan(source: ModelSource, size: ModelSize, asked: Asked) -> Capacity:
    """Return what an engine would have of a device. Raises ClickException where it does not fit."""
    dtype = _dtype(size, asked)
    kv_dtype = dtype if asked.kv_cache_dtype == "auto" else _FP8
    is_fp8 = _is_fp8(size, asked)
    block_bytes = kv_block_bytes(size.shape, asked.block_size, _KV_BYTES[kv_dtype])
    weight_bytes = size.weight_bytes(_ELEMENT_BYTES[dtype], fp8=is_fp8)
    num_blocks = _kv_bytes(weight_bytes, asked) // block_bytes
    if num_blocks < 1:
        raise click.ClickException(f"nothing is left for KV beside {readable_bytes(weight_bytes)} of weights")
    return Capacity(
        model_path=str(source.path),
        architecture=size.shape.architecture,
        num_parameters=size.num_parameters,
        weight_bytes=weight_bytes,
        dtype=dtype,
        quantization="fp8" if is_fp8 else None,
        kv_dtype=kv_dtype,
        device=asked.device,
        kv_bytes=num_blocks * block_bytes,
        block_size=asked.block_size,
        num_blocks=num_blocks,
        max_model_len=_max_model_len(size, asked, num_blocks * asked.block_size),
        max_num_seqs=_DEFAULTS.max_num_seqs,
        max_num_batched_tokens=_DEFAULTS.max_num_batched_tokens,
        enable_prefix_caching=_DEFAULTS.enable_prefix_caching,
    )


def _is_fp8(size: ModelSize, asked: Asked) -> bool:
    if asked.quantization is None and not size.has_fp8_weights:
        return False
    if size.fp8_sizes is None:
        raise click.ClickException("--quantization: a model's experts cannot be in fp8")
    return True


def _dtype(size: ModelSize, asked: Asked) -> str:
    dtype = asked.dtype if asked.dtype != "auto" else size.dtype
    if dtype is None:
        return "float32" if asked.total_bytes is None else "bfloat16"
    if dtype not in _ELEMENT_BYTES:
        raise click.ClickException(f"weights of type {dtype} are not supported; {', '.join(_ELEMENT_BYTES)} are")
    return dtype


def _kv_bytes(weight_bytes: int, asked: Asked) -> int:
    if asked.kv_cache_memory is not None:
        return asked.kv_cache_memory
    assert asked.total_bytes is not None
    return left_for_kv(asked.total_bytes, asked.gpu_memory_utilization, weight_bytes + CONTEXT_BYTES)


def _max_model_len(size: ModelSize, asked: Asked, pool_tokens: int) -> int:
    """Return the longest request: as the engine does, one that was asked for must fit, and the model's own is cut."""
    trained = size.shape.max_position_embeddings
    if asked.max_model_len is None:
        return min(trained, pool_tokens)
    if asked.max_model_len > min(trained, pool_tokens):
        raise click.ClickException(
            f"--max-model-len: {asked.max_model_len} is more than the model's {trained} or the {pool_tokens} that fit"
        )
    return asked.max_model_len


def _num_requests(planned: Capacity, context: int) -> int:
    """Return how many requests of `context` tokens fit at once."""
    return planned.num_blocks // -(-context // planned.block_size)


def _lines(planned: Capacity, asked: Asked) -> Iterator[str]:
    yield f"{_num_requests(planned, asked.context):,} requests of {asked.context:,} tokens at once"
    yield f"KV takes {planned.kv_bytes // planned.num_tokens:,} bytes a token"
    if asked.kv_cache_memory is None and asked.total_bytes is not None:
        yield (
            f"assumed: {readable_bytes(asked.total_bytes)} of memory filled to {asked.gpu_memory_utilization:g}, "
            f"{readable_bytes(CONTEXT_BYTES)} of it taken by CUDA"
        )


def _as_dict(planned: Capacity, context: int) -> dict[str, Any]:
    return {
        **asdict(planned),
        "num_tokens": planned.num_tokens,
        "num_full_requests": round(planned.num_full_requests, 2),
        "kv_block_bytes": planned.kv_bytes // planned.num_blocks,
        "context": context,
        "num_requests": _num_requests(planned, context),
    }
