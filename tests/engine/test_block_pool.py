import pytest

from kvern.engine.block_pool import BlockPool


def register_chain(pool: BlockPool, block_ids: list[int], digests: list[bytes]) -> None:
    parent: bytes | None = None
    for block_id, digest in zip(block_ids, digests, strict=True):
        pool.register(block_id, digest, parent)
        parent = digest


def test_allocate_more_than_free_raises_and_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(RuntimeError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_release_twice_raises() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(blocks)


def test_find_prefix_after_release_still_finds_blocks() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    register_chain(pool, blocks[:2], [b"a", b"b"])
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.find_prefix([b"a", b"b", b"c"]) == blocks[:2]
    pool.check_integrity([])


def test_share_of_free_cached_block_takes_it_off_the_free_list() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    register_chain(pool, blocks, [b"a"])
    pool.release(blocks)
    assert pool.count_unreferenced(blocks) == 1
    pool.share(blocks)
    assert pool.count_unreferenced(blocks) == 0
    assert pool.num_free == 1
    assert pool.allocate(1) != blocks
    pool.check_integrity([blocks, [1 - blocks[0]]])


def test_allocate_evicts_the_tail_of_a_chain_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    register_chain(pool, blocks, [b"a", b"b", b"c"])
    pool.release(blocks)
    for length in (2, 1, 0):
        pool.allocate(1)
        assert pool.find_prefix([b"a", b"b", b"c"]) == blocks[:length]


def test_allocate_takes_blocks_without_digest_first_then_the_least_recently_freed() -> None:
    pool = BlockPool(4)
    old, young, plain = pool.allocate(1), pool.allocate(1), pool.allocate(2)
    register_chain(pool, old, [b"old"])
    register_chain(pool, young, [b"young"])
    pool.release(old)
    pool.release(young)
    pool.release(plain)
    assert sorted(pool.allocate(2)) == sorted(plain)
    assert pool.allocate(1) == old
    assert pool.allocate(1) == young


def test_register_of_a_resident_digest_points_at_the_resident_block_and_frees_the_duplicate() -> None:
    """F05: one physical block a digest, so it leaves with its last copy."""
    pool = BlockPool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    register_chain(pool, first, [b"a"])
    assert pool.register(second[0], b"a", None) == first[0]
    assert pool.num_free == 1
    pool.check_integrity([first, first])


@pytest.mark.parametrize("damage", ["holder", "digest", "parent", "length"])
def test_check_integrity_of_a_damaged_pool_names_the_damage(damage: str) -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    register_chain(pool, blocks, [b"a", b"b"])
    tables = [blocks]
    if damage == "holder":
        tables = []
    elif damage == "digest":
        pool._blocks[blocks[1]].digest = b"a"
    elif damage == "parent":
        pool._forget(pool._blocks[blocks[0]])
    else:
        pool._free.length += 1
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)
