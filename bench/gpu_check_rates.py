"""The stage of `make gpu-check` that measures kernels on the shapes of Llama 3 8B."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch
from gpu_check_finding import Finding
from gpu_check_kernels import COPIES, PRODUCTS, READS
from torch.nn.attention import SDPBackend

from kvern.kernels import target
from kvern.kernels.ceilings.rates import measure_rate
from kvern.kernels.paged_attention import bench

SAMPLER = "sampling: top_k 50, top_p 0.95, 64 x 128,256"
"""Of the kinds of sampling the one that does most."""

_OPERATIONS = ("block_copy", "experts", "gated_activation", "rms_norm", "rotary_kv", "sampling", "token_mask")
_FP8_OPERATIONS = ("fp8_linear",)
_LEAST_FP8_ARCHITECTURE = 90
_DECODES = ((64, 4096), (64, 1024), (1, 4096), (1, 32768))
_AIMED_DECODE = (64, 4096)
_PREFILLS = (2048, 8192, 32768)
_NUM_LAYERS = 32
_POOL_SHARE = 0.6
"""Of the GPU's free memory, for comparing layouts: as much as an engine's pool."""
_LEAST_POOL_BYTES = 64 * 4096 * _NUM_LAYERS * 2 * 2 * bench.NUM_KV_HEADS * bench.HEAD_DIM + (1 << 30)
"""For 64 sequences of 4,096 tokens, whatever the blocks' size."""


def measure_kernels(device: str, known: dict[str, float]) -> Iterator[Finding]:
    gpu = torch.device(device)
    reads, copies = (known[name] * 1e9 for name in (READS, COPIES))
    yield from _decodes(gpu, reads)
    torch.cuda.empty_cache()
    yield from _prefills(gpu)
    torch.cuda.empty_cache()
    yield from _operations(gpu, copies, known[PRODUCTS] * 1e12)
    torch.cuda.empty_cache()
    yield from _layouts(gpu, reads)


def _decodes(device: torch.device, reads: float) -> Iterator[Finding]:
    """Decode attention beside a kernel that only reads, and fp8 KV beside bfloat16."""
    has_fp8 = target.architecture() >= _LEAST_FP8_ARCHITECTURE
    seconds = {}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn) if has_fp8 else (torch.bfloat16,):
        kv, kind = bench.make_pool(64 * 4096 // 16, 16, dtype, device), "fp8" if dtype.itemsize == 1 else "bfloat16"
        for shape in _DECODES:
            measured = bench.measure(kv, *shape, 1)
            rate = measured.kv_bytes / measured.seconds
            aim = 0.85 if shape == _AIMED_DECODE and dtype.itemsize > 1 else None
            name = f"decode attention {shape[0]} x {shape[1]:,}, {kind} KV"
            yield Finding(name, rate / 1e9, "GB/s")
            yield Finding(f"{name}, of reads", rate / reads, "%", at_least=aim)
            seconds[kind, shape] = measured.seconds
        del kv
    if has_fp8:
        ratio = seconds["bfloat16", _AIMED_DECODE] / seconds["fp8", _AIMED_DECODE]
        yield Finding("decode attention 64 x 4,096, fp8 KV over bfloat16", ratio, "x", at_least=1.5)


def _prefills(device: torch.device) -> Iterator[Finding]:
    """Whole prompts beside torch's own attention, which reads no block table."""
    kv = bench.make_pool(_PREFILLS[-1] // 16, 16, torch.bfloat16, device)
    for length in _PREFILLS:
        measured = bench.measure(kv, 1, length, length)
        name = f"prefill attention {length:,}"
        yield Finding(name, measured.operations / measured.seconds / 1e12, "TFLOP/s")
        for backend, aim in ((SDPBackend.FLASH_ATTENTION, 0.75), (SDPBackend.CUDNN_ATTENTION, None)):
            yield _beside_dense(f"{name}, of torch's {backend.name.lower()}", measured.seconds, length, backend, aim)


def _beside_dense(name: str, seconds: float, length: int, backend: SDPBackend, aim: float | None) -> Finding:
    """Not every build of torch has every backend."""
    try:
        dense = bench.measure_dense(length, torch.device("cuda"), backend)
    except RuntimeError as error:
        return Finding(name, f"not there: {str(error).splitlines()[0][:60]}")
    return Finding(name, dense / seconds, "%", at_least=aim)


def _operations(device: torch.device, copies: float, products: float) -> Iterator[Finding]:
    """Everything else: bytes beside copies, operations beside a large product. The sampler in microseconds too."""
    has_fp8 = target.architecture() >= _LEAST_FP8_ARCHITECTURE
    for operation in _OPERATIONS + (_FP8_OPERATIONS if has_fp8 else ()):
        works = importlib.import_module(f"kvern.kernels.{operation}.bench").works
        for work in works(device):
            measured = measure_rate(work, copies, products)
            name = f"{operation}: {work.name}"
            scale = 1e12 if measured.unit == "TFLOP/s" else 1e9
            yield Finding(name, measured.rate / scale, measured.unit)
            if operation == "sampling":
                yield Finding(f"{name}, 64 x 128,256", measured.seconds * 1e6, "us")


def _layouts(device: torch.device, reads: float) -> Iterator[Finding]:
    """Decode attention over a random permutation of a pool as large as an engine's, in both layouts."""
    num_bytes = int(torch.cuda.mem_get_info(device)[0] * _POOL_SHARE)
    if num_bytes < _LEAST_POOL_BYTES:
        yield Finding("layouts", f"not measured: a pool of {_LEAST_POOL_BYTES / 2**30:.0f} GiB is needed")
        return
    memory = _random_memory(num_bytes, device)
    for block_size in (16, 32, 64):
        seconds = {}
        for layout in ("block-major", "layer-major"):
            kv = bench.view_pool(memory, _NUM_LAYERS, block_size, layer_major=layout == "layer-major")
            measured = bench.measure(kv, *_AIMED_DECODE, 1)
            seconds[layout] = measured.seconds
            name = f"decode attention 64 x 4,096, {layout}, blocks of {block_size}, of reads"
            yield Finding(name, measured.kv_bytes / measured.seconds / reads, "%")
        ratio = seconds["layer-major"] / seconds["block-major"]
        yield Finding(f"layer-major's time over block-major's, blocks of {block_size}", ratio, "x")


def _random_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return bfloat16 elements, as many as a whole number of the largest blocks has."""
    largest = _NUM_LAYERS * 2 * bench.NUM_KV_HEADS * 64 * bench.HEAD_DIM
    return torch.empty(num_bytes // 2 // largest * largest, dtype=torch.bfloat16, device=device).normal_()
