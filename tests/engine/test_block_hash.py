import hashlib
import struct
import subprocess
import sys

from kvern.engine.block_hash import DEFAULT_KEY, DIGEST_BYTES, extend_digests, key_fingerprint, root_digest
from kvern.engine.contract import cache_contract


def test_extend_digests_of_two_blocks_is_the_documented_hash() -> None:
    root = root_digest("contract")

    def plain(parent: bytes, ids: list[int]) -> bytes:
        data = b"B" + struct.pack("<Q", 4 * len(ids)) + parent + struct.pack(f"<{len(ids)}I", *ids)
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=DEFAULT_KEY).digest()

    first = plain(root, [1, 2])
    assert extend_digests(root, [1, 2, 3, 4], 2) == [first, plain(first, [3, 4])]


def test_extend_digests_partial_block_has_none() -> None:
    root = root_digest("contract")
    assert extend_digests(root, [1, 2, 3], 4) == []
    assert len(extend_digests(root, list(range(9)), 4)) == 2


def test_extend_digests_in_pieces_equals_at_once() -> None:
    ids = list(range(100_000, 100_064))
    whole = extend_digests(root_digest("contract"), ids, 16)
    assert whole[:2] + extend_digests(whole[1], ids[32:], 16) == whole


def test_digests_in_another_process_are_equal() -> None:
    """C21."""
    code = (
        "from kvern.engine.block_hash import *;"
        "print(b''.join(extend_digests(root_digest('c', 's', 'a'), range(64), 16)).hex())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == b"".join(extend_digests(root_digest("c", "s", "a"), range(64), 16)).hex()


def test_root_digest_salt_equal_to_an_adapters_name_differs() -> None:
    """C20, F13."""
    roots = [
        root_digest("c", salt="x"),
        root_digest("c", adapter="x"),
        root_digest("c", salt="xx"),
        root_digest("cx"),
        root_digest("c"),
        root_digest("c", key=b"other"),
    ]
    assert len(set(roots)) == len(roots)


def test_fingerprint_tells_secret_keys_apart_and_is_empty_for_the_one_everybody_knows() -> None:
    assert key_fingerprint(DEFAULT_KEY) == ""
    assert len({key_fingerprint(b"one"), key_fingerprint(b"other"), ""}) == 3


def test_contracts_of_different_keys_differ() -> None:
    """Their digests never match, so their replicas are of different pools."""
    contracts = {
        cache_contract(model_fingerprint="weights", dtype="float32", kv_dtype="float32", block_size=16, digest_key=key)
        for key in (DEFAULT_KEY, b"one", b"other")
    }
    assert len(contracts) == 3
