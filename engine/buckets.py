"""Sizes of steps that CUDA graphs are made for, and what fills a step up to one. No torch.

A step's tokens lie one after another. What fills it up are entries of context length 0 behind the real ones: they write
no KV, attend nothing, and nobody samples from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MIXED_TOKENS = (512, 256, 128, 64, 32)
"""Tokens of steps that hold chunks of prompts. Larger ones keep the device busy longer than launching them takes."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One size of step."""

    num_tokens: int
    num_entries: int
    num_rows: int
    """Sampled rows."""
    is_decode: bool
    """Whether every entry is one token."""


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Return the buckets of an engine, those with most tokens first: memory of a large graph serves smaller ones.

    Steps of decodes alone have sizes of 1, 2, 4, 8, multiples of 16 and the most there may be. Others have room for one
    entry more than there may be, which takes what fills them up.
    """
    mixed = [
        Bucket(num_tokens, max_num_seqs + 1, max_num_seqs, is_decode=False)
        for num_tokens in _MIXED_TOKENS
        if num_tokens <= max_num_batched_tokens
    ]
    most = min(max_num_seqs, max_num_batched_tokens)
    sizes = {size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most} | {most}
    decodes = [Bucket(size, size, size, is_decode=True) for size in sizes]
    return sorted(mixed + decodes, key=lambda bucket: bucket.num_tokens, reverse=True)


def find_bucket(buckets: Iterable[Bucket], num_tokens: int, num_entries: int) -> Bucket | None:
    """Return the smallest bucket that a step fits, of two as large the one for decodes. None: it fits none."""
    is_decode = num_tokens == num_entries
    fitting = [
        bucket
        for bucket in buckets
        if bucket.num_tokens >= num_tokens and (is_decode if bucket.is_decode else bucket.num_entries > num_entries)
    ]
    return min(fitting, key=lambda bucket: (bucket.num_tokens, not bucket.is_decode), default=None)


def fill_entries(bucket: Bucket, entries: Sequence[list[int]], slot: int) -> list[int]:
    """Return what `StepInputs.entries` has of all the bucket's entries, one list after another.

    slot: that of entries that fill up. They count one cached token, so that no KV is written.
    """
    slots, counts, context_lens, num_resident = entries
    missing = bucket.num_entries - len(slots)
    missing_tokens = bucket.num_tokens - sum(counts)
    filling = [1] * missing if bucket.is_decode else [0] * (missing - 1) + [missing_tokens]
    return [
        *slots, *[slot] * missing,
        *counts, *filling,
        *context_lens, *[0] * missing,
        *num_resident, *[1] * missing,
    ]  # fmt: skip


def fill_rows(bucket: Bucket, columns: Sequence[list[int]], padding: Sequence[int]) -> list[int]:
    """Return the columns of all the bucket's sampled rows, one after another. padding: a row that fills up."""
    filled = []
    for column, value in zip(columns, padding, strict=True):
        filled += column + [value] * (bucket.num_rows - len(column))
    return filled
