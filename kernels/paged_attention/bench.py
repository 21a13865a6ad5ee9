"""Attention on a GPU against what the GPU can do: `python -m kvern.kernels.paged_attention.bench`.

Without a GPU it measures the CPU's: `cpu_bench`.

Decode is told in bytes of KV a second, beside a kernel that only reads; prefill in operations a second, beside torch's
dense attention of the same queries, keys and values.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import attention, functional

from kvern.kernels.ceilings import median_s, read_bandwidth
from kvern.kernels.paged_attention import AttentionMetadata, cpu_bench, paged_attention, plan_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 32, 8, 128, 4
"""Of Llama 3 8B, with fewer layers."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one launch of attention took."""

    seconds: float
    kv_bytes: int
    """Keys and values of all contexts."""
    operations: int
    """Of both products, over what causality lets see."""


def make_pool(num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a pool of random KV, layers of a block together."""
    shape = (num_blocks, NUM_LAYERS, 2, NUM_KV_HEADS, block_size, HEAD_DIM)
    return torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)


def view_pool(memory: Tensor, num_layers: int, block_size: int, *, layer_major: bool) -> Tensor:
    """Return flat memory, of as many elements as a number of blocks has, as a pool.

    layer_major: blocks of a layer lie together, instead of layers of a block.
    """
    block = (2, NUM_KV_HEADS, block_size, HEAD_DIM)
    if layer_major:
        return memory.view(num_layers, -1, *block).transpose(0, 1)
    return memory.view(-1, num_layers, *block)


def measure(kv: Tensor, num_seqs: int, context_len: int, query_len: int) -> Measured:
    """Time one layer's attention of sequences whose blocks are dealt out at random."""
    metadata = plan_random(kv, num_seqs, context_len, query_len)
    activation = kv.dtype if kv.dtype.itemsize > 1 else torch.bfloat16
    q = torch.randn(num_seqs * query_len, NUM_HEADS, HEAD_DIM, dtype=activation, device=kv.device)
    seconds = median_s(partial(paged_attention, q, kv, kv.shape[1] - 1, metadata, HEAD_DIM**-0.5))
    seen = num_seqs * sum(range(context_len - query_len + 1, context_len + 1))
    token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * kv.element_size()
    return Measured(seconds, num_seqs * context_len * token_bytes, 4 * seen * NUM_HEADS * HEAD_DIM)


def plan_random(kv: Tensor, num_seqs: int, context_len: int, query_len: int) -> AttentionMetadata:
    device, num_tokens, blocks_each = kv.device, num_seqs * query_len, -(-context_len // kv.shape[4])
    table = torch.randperm(len(kv), device=device)[: num_seqs * blocks_each].to(torch.int32).view(num_seqs, -1)
    is_fp8 = kv.dtype.itemsize == 1
    return plan_attention(
        kv,
        table,
        torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len,
        torch.full((num_seqs,), context_len, dtype=torch.int32, device=device),
        torch.full((num_tokens,), -1, device=device),
        backend="triton",
        max_query_len=query_len,
        kv_scales=torch.ones(2, kv.shape[1], NUM_KV_HEADS, device=device) if is_fp8 else None,
    )


def measure_dense(length: int, device: torch.device, backend: attention.SDPBackend) -> float:
    """Return the seconds of torch's own causal attention of one whole prompt, heads of a group sharing KV."""
    q = torch.randn(1, NUM_HEADS, length, HEAD_DIM, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, 1, NUM_KV_HEADS, length, HEAD_DIM, dtype=torch.bfloat16, device=device)
    with attention.sdpa_kernel(backend):
        return median_s(partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True))


def print_decode(device: torch.device) -> None:
    ceiling = read_bandwidth(device)
    print(f"reads only: {ceiling / 1e9:,.0f} GB/s")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        kv = make_pool(64 * 4096 // 16, 16, dtype, device)
        for num_seqs, context_len in ((64, 4096), (64, 1024), (1, 4096), (1, 32768)):
            measured = measure(kv, num_seqs, context_len, 1)
            rate = measured.kv_bytes / measured.seconds
            print(
                f"decode {num_seqs:3} x {context_len:6,} {str(dtype).removeprefix('torch.'):13} "
                f"{measured.seconds * 1e6:8.1f} us {rate / 1e9:8,.0f} GB/s {rate / ceiling:5.0%} of reads"
            )


def print_prefill(device: torch.device) -> None:
    kv = make_pool(2048, 16, torch.bfloat16, device)
    for length in (2048, 8192, 32768):
        measured = measure(kv, 1, length, length)
        print(f"prefill {length:6,} {measured.operations / measured.seconds / 1e12:6.0f} TFLOP/s", end="")
        for backend in (attention.SDPBackend.FLASH_ATTENTION, attention.SDPBackend.CUDNN_ATTENTION):
            dense = measure_dense(length, device, backend)
            print(f"; {dense / measured.seconds:.0%} of torch's {backend.name.lower()}", end="")
        print()


def main() -> int:
    if not torch.cuda.is_available():
        return cpu_bench.main(sys.argv[1:])
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(device))
    print_decode(device)
    print_prefill(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
