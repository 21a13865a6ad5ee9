from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvern.engine.block_hash import extend_digests, root_digest
from kvern.services.router.prefills import GRACE_S, MAX_REMEMBERED, Prefills, num_common

ROOT = root_digest("c")


def digests_of(token_ids: Sequence[int]) -> bytes:
    """One token a block."""
    return b"".join(extend_digests(ROOT, token_ids, 1))


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    st.lists(st.integers(0, 9), max_size=20),
    st.lists(st.integers(0, 9), max_size=20),
    st.lists(st.integers(0, 9), max_size=20),
)
def test_num_common_is_the_length_of_the_common_beginning(
    shared: list[int], tail: list[int], other_tail: list[int]
) -> None:
    one, other = [*shared, *tail], [*shared, *other_tail]
    naive = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    for start in range(naive + 1):
        assert num_common(digests_of(one), digests_of(other), start) == naive


def test_prompt_sent_counts_as_resident_until_shortly_after_its_first_token() -> None:
    prefills = Prefills(clock := Clock())
    prefill = prefills.begin(5, 0, digests_of([1, 2, 3, 4, 5]))
    clock.now += 3600
    follower = digests_of([1, 2, 3, 9])
    assert prefills.num_blocks(follower, 0) == prefills.num_blocks(follower, 2) == 3
    assert prefills.num_blocks(digests_of([9]), 0) == 0
    prefills.compute(prefill)
    clock.now += GRACE_S / 2
    prefills.compute(prefill)
    assert prefills.num_blocks(follower, 0) == 3
    clock.now += GRACE_S / 2
    assert prefills.num_blocks(follower, 0) == 0


def test_prompt_whose_request_ended_uncomputed_is_forgotten_at_once() -> None:
    prefills = Prefills(Clock())
    prefill = prefills.begin(2, 0, digests_of([1, 2]))
    prefills.drop(prefill)
    assert (prefills.num_blocks(digests_of([1, 2]), 0), prefills.num_tokens) == (0, 0)


def test_prompt_computed_stays_when_its_request_ends() -> None:
    prefills = Prefills(Clock())
    prefill = prefills.begin(2, 0, digests_of([1, 2]))
    prefills.compute(prefill)
    prefills.drop(prefill)
    assert prefills.num_blocks(digests_of([1, 2]), 0) == 2


def test_what_the_index_knows_is_never_made_less() -> None:
    prefills = Prefills(Clock())
    prefills.begin(1, 0, digests_of([1]))
    assert prefills.num_blocks(digests_of([1, 2, 3]), 3) == 3


def test_tokens_are_queued_until_the_first_token_or_the_end() -> None:
    prefills = Prefills(Clock())
    first, second = prefills.begin(100, 0, b""), prefills.begin(20, 0, digests_of([1]))
    assert prefills.num_tokens == 120
    prefills.compute(first)
    prefills.drop(first)
    assert prefills.num_tokens == 20
    prefills.drop(second)
    assert prefills.num_tokens == 0


def test_prompt_is_reported_whole_while_it_waits_and_then_as_what_is_computed() -> None:
    prefills = Prefills(Clock())
    waiting, running, gone = (prefills.begin(10, 90, b"") for _ in range(3))
    prefills.schedule(running)
    prefills.schedule(running)
    prefills.drop(gone)
    assert (prefills.num_tokens, prefills.num_reported) == (20, 110)
    for prefill in (waiting, running):
        prefills.compute(prefill)
    assert (prefills.num_tokens, prefills.num_reported) == (0, 0)


def test_a_flood_of_unique_prompts_is_remembered_within_bounds() -> None:
    """F18."""
    prefills = Prefills(Clock())
    prompts = [hashlib.blake2b(number.to_bytes(4), digest_size=16).digest() for number in range(100_000)]
    sent = [prefills.begin(1, 0, prompt) for prompt in prompts]
    known = [prefills.num_blocks(prompt, 0) for prompt in prompts[-2 * MAX_REMEMBERED :]]
    assert known == [0] * MAX_REMEMBERED + [1] * MAX_REMEMBERED
    for prefill in sent:
        prefills.drop(prefill)
    assert prefills.num_tokens == 0
