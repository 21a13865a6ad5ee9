"""Attention on a CPU: the compiled kernel against gathering blocks and torch's dense attention.

The heads are SmolLM2-135M's, in bfloat16, over as many layers as it has, each with KV of its own, so that caches hold
what they hold in a step. Both take turns, and the shortest time of each counts: others' work on the machine only adds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kvern.kernels.paged_attention import paged_attention, plan_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS, BLOCK_SIZE = 9, 3, 64, 30, 16

SHAPES = [(1, 100, 1), (1, 2000, 1), (16, 100, 1), (64, 100, 1), (8, 4000, 1), (1, 2048, 512), (1, 4000, 512)]
"""Sequences, their contexts, and how many queries each has."""

_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Row:
    """What attention of all layers took."""

    num_seqs: int
    context_len: int
    query_len: int
    compiled_ms: float
    gathered_ms: float
    gb_per_s: float
    """KV that the compiled kernel reads, each once, a second."""
    gflops: float
    """Operations of its two products, over what causality lets see."""


def measure(num_seqs: int, context_len: int, query_len: int) -> Row:
    """Time both ways over blocks that are dealt out at random."""
    num_blocks = num_seqs * -(-context_len // BLOCK_SIZE)
    kv = _random(num_blocks, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    q = _random(num_seqs * query_len, NUM_HEADS, HEAD_DIM)
    compiled, gathered = _shortest(*(_attention(q, kv, num_seqs, context_len, name) for name in ("numba", "torch")))
    seen = num_seqs * sum(range(context_len - query_len + 1, context_len + 1))
    num_bytes = num_seqs * context_len * 2 * NUM_KV_HEADS * HEAD_DIM * kv.element_size() * NUM_LAYERS
    operations = 4 * seen * NUM_HEADS * HEAD_DIM * NUM_LAYERS
    rates = num_bytes / compiled / 1e9, operations / compiled / 1e9
    return Row(num_seqs, context_len, query_len, compiled * 1e3, gathered * 1e3, *rates)


def _random(*shape: int) -> Tensor:
    """Fill a tensor with the same few random numbers again and again: they take long to draw."""
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    drawn = torch.randn(1 << 16).to(torch.bfloat16)
    memory = tensor.view(-1)
    for begin in range(0, len(memory), len(drawn)):
        piece = memory[begin : begin + len(drawn)]
        piece.copy_(drawn[: len(piece)])
    return tensor


def _attention(q: Tensor, kv: Tensor, num_seqs: int, context_len: int, backend: str) -> Callable[[], None]:
    query_len = len(q) // num_seqs
    metadata = plan_attention(
        kv,
        torch.randperm(len(kv)).to(torch.int32).view(num_seqs, -1),
        torch.arange(num_seqs + 1, dtype=torch.int32) * query_len,
        torch.full((num_seqs,), context_len, dtype=torch.int32),
        torch.full((len(q),), -1),
        backend=backend,
    )

    def attend() -> None:
        for layer in range(kv.shape[1]):
            paged_attention(q, kv, layer, metadata, HEAD_DIM**-0.5)

    return attend


def _shortest(*works: Callable[[], None]) -> list[float]:
    times: list[list[float]] = [[] for _ in works]
    for _ in range(_REPEATS):
        for work, taken in zip(works, times, strict=True):
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
    return [min(taken) for taken in times]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Attention on a CPU.")
    parser.add_argument("--json", action="store_true", help="one line for programs")
    options = parser.parse_args(arguments)
    rows = [measure(*shape) for shape in SHAPES]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print(f"{torch.get_num_threads()} threads, {NUM_LAYERS} layers, bfloat16")
    print("sequences x context, queries   compiled    gathered  ratio   GB/s  GFLOP/s")
    for row in rows:
        shape = f"{row.num_seqs:9} x {row.context_len:7,} {row.query_len:8}"
        times = f"{row.compiled_ms:8.2f} ms {row.gathered_ms:8.1f} ms {row.gathered_ms / row.compiled_ms:6.1f}"
        print(f"{shape} {times} {row.gb_per_s:6.1f} {row.gflops:8.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
