"""A step as two CUDA graphs for each bucket: forward up to the logits, and the sampler.

A graph holds all of a step from the numbers that the host copies into one buffer: layout, attention's plan, layers. It
reads the persistent batch where that lies. All graphs write the same logits and the same draws, so at most one step at
a time is between its forward and its sampler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvern.engine.batch import PADDING_SLOT, StepInputs
from kvern.engine.buckets import Bucket, fill_entries, fill_rows, find_bucket
from kvern.engine.device_copy import PinnedRing
from kvern.engine.fused_sampler import NUM_COLUMNS, PADDING_ROW

_ENTRY_NUMBERS = 4
"""Of an entry: see `StepInputs.entries`."""

Program = Callable[[], None]
"""Work on the device, between places that do not change."""

Capture = Callable[[Program], Program]
"""Returns what does the same again, without its host's work."""

Progress = Callable[[float, str], None]


Forward = Callable[[Tensor, Tensor, Bucket], Tensor]
"""Return the logits of sampled rows, [num_rows, vocab_size] float32, given entries, [4, num_entries] int64 as in
`StepInputs`, and rows of the step's tokens, [num_rows] int64."""

Draw = Callable[[Tensor, Tensor], Tensor]
"""`FusedSampler.draw`."""


class CudaCapture:
    """Captures programs as CUDA graphs whose memory is shared: they run one after another. Implements `Capture`."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, program: Program) -> Program:
        program()  # compiles kernels and takes memory that a capture may not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            program()
        return graph.replay


class StepGraphs:
    """The graphs of all buckets, and the memory that they read and write."""

    def __init__(
        self,
        buckets: list[Bucket],
        forward: Forward,
        draw: Draw,
        vocab_size: int,
        ring: PinnedRing,
    ) -> None:
        """buckets: largest first."""
        self.buckets = buckets
        self.capture_s = 0.0
        self._compute, self._sample, self._ring = forward, draw, ring
        num_entries = max(bucket.num_entries for bucket in buckets)
        num_rows = max(bucket.num_rows for bucket in buckets)
        num_numbers = _ENTRY_NUMBERS * num_entries + NUM_COLUMNS * num_rows
        self._numbers = torch.zeros(num_numbers, dtype=torch.int64, device=ring.device)
        self._logits = torch.zeros((num_rows, vocab_size), dtype=torch.float32, device=ring.device)
        self._drawn = torch.zeros((3, num_rows), dtype=torch.int64, device=ring.device)
        self._forwards: dict[Bucket, Program] = {}
        self._samplers: dict[Bucket, Program] = {}

    def capture(self, capture: Capture, progress: Progress) -> None:
        """Make the graphs. On the thread that launches them, before any request."""
        started_s = time.perf_counter()
        for done, bucket in enumerate(self.buckets):
            progress(done / len(self.buckets), f"capturing steps of {bucket.num_tokens} tokens")
            self._write(_numbers_of_no_step(bucket))
            self._forwards[bucket] = capture(partial(self._forward, bucket))
            self._samplers[bucket] = capture(partial(self._draw, bucket))
        progress(1.0, "captured")
        self.capture_s = time.perf_counter() - started_s

    def find(self, inputs: StepInputs) -> Bucket | None:
        """Return the bucket of a step. None: it is launched piece by piece, as where all hidden states are wanted."""
        return None if inputs.prompts else find_bucket(self.buckets, inputs.num_tokens, len(inputs.entries[0]))

    def forward(self, bucket: Bucket, inputs: StepInputs, columns: list[list[int]]) -> Tensor:
        """Launch a step up to its logits: [num_sampled, vocab_size], which the next step overwrites."""
        entries = fill_entries(bucket, inputs.entries, PADDING_SLOT)
        self._write(entries + fill_rows(bucket, columns, PADDING_ROW))
        self._forwards[bucket]()
        return self._logits[: len(inputs.sampled)]

    def draw(self, bucket: Bucket, num_sampled: int) -> Tensor:
        """Launch the sampler of the step launched last. Returns [3, num_sampled], as `FusedSampler.draw`."""
        self._samplers[bucket]()
        # A copy, as the host may read it while the next step is drawn.
        return self._drawn[:, :num_sampled].clone()

    def _write(self, numbers: list[int]) -> None:
        self._ring.copy(torch.tensor(numbers), self._numbers)

    def _forward(self, bucket: Bucket) -> None:
        entries, columns = self._views(bucket)
        self._logits[: bucket.num_rows].copy_(self._compute(entries, columns[0], bucket))

    def _draw(self, bucket: Bucket) -> None:
        _, columns = self._views(bucket)
        self._drawn[:, : bucket.num_rows].copy_(self._sample(self._logits[: bucket.num_rows], columns))

    def _views(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return where a bucket's entries and sampled rows are read."""
        end_of_entries = _ENTRY_NUMBERS * bucket.num_entries
        end = end_of_entries + NUM_COLUMNS * bucket.num_rows
        return (
            self._numbers[:end_of_entries].view(_ENTRY_NUMBERS, bucket.num_entries),
            self._numbers[end_of_entries:end].view(NUM_COLUMNS, bucket.num_rows),
        )


def _numbers_of_no_step(bucket: Bucket) -> list[int]:
    """Return a bucket with nothing but what fills it up: it writes no KV, and draws nothing."""
    no_entries: list[list[int]] = [[] for _ in range(_ENTRY_NUMBERS)]
    no_rows: list[list[int]] = [[] for _ in range(NUM_COLUMNS)]
    return fill_entries(bucket, no_entries, PADDING_SLOT) + fill_rows(bucket, no_rows, PADDING_ROW)
