"""Which graph a step is launched as, and what fills it up."""

from __future__ import annotations

import pytest

from kvern.engine.buckets import Bucket, fill_entries, fill_rows, find_bucket, make_buckets


def sizes(buckets: list[Bucket], *, is_decode: bool) -> list[int]:
    return [bucket.num_tokens for bucket in buckets if bucket.is_decode is is_decode]


def test_buckets_of_a_default_engine_come_largest_first() -> None:
    buckets = make_buckets(max_num_seqs=64, max_num_batched_tokens=2048)
    assert sizes(buckets, is_decode=True) == [64, 48, 32, 16, 8, 4, 2, 1]
    assert sizes(buckets, is_decode=False) == [512, 256, 128, 64, 32]
    assert [bucket.num_tokens for bucket in buckets] == sorted((b.num_tokens for b in buckets), reverse=True)


def test_buckets_stay_within_sequences_and_tokens() -> None:
    assert sizes(make_buckets(5, 100), is_decode=True) == [5, 4, 2, 1]
    assert sizes(make_buckets(5, 100), is_decode=False) == [64, 32]
    assert sizes(make_buckets(300, 20), is_decode=True) == [20, 16, 8, 4, 2, 1]
    assert make_buckets(1, 1) == [Bucket(1, 1, 1, is_decode=True)]


@pytest.mark.parametrize(
    ("num_tokens", "num_entries", "found"),
    [
        (1, 1, Bucket(1, 1, 1, is_decode=True)),
        (3, 3, Bucket(4, 4, 4, is_decode=True)),
        (64, 64, Bucket(64, 64, 64, is_decode=True)),
        (3, 2, Bucket(32, 65, 64, is_decode=False)),
        (33, 1, Bucket(64, 65, 64, is_decode=False)),
        (512, 64, Bucket(512, 65, 64, is_decode=False)),
        (513, 64, None),
    ],
)
def test_a_step_takes_the_smallest_bucket_that_it_fits(num_tokens: int, num_entries: int, found: Bucket | None) -> None:
    assert find_bucket(make_buckets(64, 2048), num_tokens, num_entries) == found


def test_decodes_are_filled_up_by_entries_of_one_token_without_context() -> None:
    bucket = Bucket(4, 4, 4, is_decode=True)
    assert fill_entries(bucket, [[7, 3], [1, 1], [20, 9], [0, 8]], -1) == [
        *[7, 3, -1, -1],
        *[1, 1, 1, 1],
        *[20, 9, 0, 0],
        *[0, 8, 1, 1],
    ]  # fmt: skip


def test_chunks_are_filled_up_by_one_entry_with_the_tokens_that_lack() -> None:
    bucket = Bucket(16, 4, 3, is_decode=False)
    filled = fill_entries(bucket, [[7, 3], [5, 1], [5, 9], [0, 0]], -1)
    assert filled == [*[7, 3, -1, -1], *[5, 1, 0, 10], *[5, 9, 0, 0], *[0, 0, 1, 1]]


def test_a_full_step_is_filled_up_by_nothing() -> None:
    decodes = fill_entries(Bucket(2, 2, 2, is_decode=True), [[0, 1], [1, 1], [4, 5], [0, 0]], -1)
    assert decodes == [0, 1, 1, 1, 4, 5, 0, 0]
    mixed = fill_entries(Bucket(32, 2, 1, is_decode=False), [[0], [32], [32], [0]], -1)
    assert mixed == [0, -1, 32, 0, 32, 0, 0, 1]


def test_sampled_rows_are_filled_up_column_by_column() -> None:
    assert fill_rows(Bucket(4, 4, 3, is_decode=True), [[0, 3], [7, 2]], (0, -1)) == [0, 3, 0, 7, 2, -1]
