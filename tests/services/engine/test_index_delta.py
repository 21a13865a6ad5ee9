"""What is told to the index: netted, and in an order of which every beginning is prefix-closed."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvern.engine.block_hash import extend_digests, root_digest
from kvern.engine.block_pool import BlockPool
from kvern.services.engine.index_delta import Delta, PendingDelta, Position, index_member

CHAINS = [
    extend_digests(root_digest("contract"), [*range(shared), *range(100 * shared, 100 * shared + 8)], 1)
    for shared in range(6)
]
PARENTS = {index_member(child): index_member(parent) for chain in CHAINS for parent, child in pairwise(chain)}

requests = st.lists(st.tuples(st.sampled_from(range(6)), st.integers(1, 8)), max_size=30)


def serve(pool: BlockPool, chain: list[bytes]) -> None:
    table = pool.find_prefix(chain)
    pool.share(table)
    parents = [None, *chain]
    for number in range(len(table), len(chain)):
        table += pool.allocate(1)
        table[number] = pool.register(table[number], chain[number], parents[number])
    pool.release(table)


@given(before=requests, after=requests, resets=st.booleans())
def test_every_beginning_of_what_is_pending_is_prefix_closed(
    before: list[tuple[int, int]], after: list[tuple[int, int]], resets: bool
) -> None:
    pool = BlockPool(12, record_events=True)
    pending = PendingDelta()
    for chain, length in before:
        serve(pool, CHAINS[chain][:length])
    pending.record(pool.take_events())
    indexed = set(pending.take(1000).adds)
    for number, (chain, length) in enumerate(after):
        if resets and number == len(after) // 2:
            pool.reset()
        serve(pool, CHAINS[chain][:length])
    pending.record(pool.take_events())
    while pending:
        delta = pending.take(1)
        assert not indexed & set(delta.adds)
        indexed = (indexed | set(delta.adds)) - set(delta.dels)
        assert all(PARENTS.get(member) in indexed | {None} for member in indexed)
    assert indexed == {index_member(digest) for digest in pool.resident_digests}


def test_position_after_a_delta_is_that_of_the_members() -> None:
    members = [bytes([number]) * 8 for number in range(5)]
    start = Position.of(members[:3], seq=7)
    assert start.after(Delta(adds=members[3:], dels=members[:1])) == Position.of(members[1:], seq=10)
