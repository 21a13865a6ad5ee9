"""Digests of KV blocks: the same bytes in the tokenizer, the engine and the index, in every process.

A block's digest stands for all tokens up to its end, so equal digests mean equal KV:

    d(0) = H(contract, salt, adapter)        the root, of no tokens
    d(n) = H(d(n - 1), token ids of block n)

H is BLAKE2b with 128 bits, keyed. Every field is tagged and length-prefixed, so no two field lists read the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

DIGEST_VERSION = 1
DIGEST_BYTES = 16
DEFAULT_KEY = b"kvern block digest"
"""A deployment may set its own; all its processes must share it. Where tenants are kept apart it must be a secret: who
knows it can tell from a digest whether a guessed prompt is the one behind it."""

MAX_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE

_ROOT_TAG = b"R"
_BLOCK_TAG = b"B"
_KEY_TAG = b"K"


def root_digest(contract: str, salt: str = "", adapter: str = "", *, key: bytes = DEFAULT_KEY) -> bytes:
    """Return the digest before the first block. Only requests that agree in all three share blocks."""
    state = hashlib.blake2b(_ROOT_TAG, digest_size=DIGEST_BYTES, key=key)
    for tag, text in ((b"c", contract), (b"s", salt), (b"a", adapter)):
        data = text.encode()
        state.update(tag + struct.pack("<Q", len(data)) + data)
    return state.digest()


def extend_digests(
    parent: bytes, token_ids: Sequence[int], block_size: int, *, key: bytes = DEFAULT_KEY
) -> list[bytes]:
    """Return the digests of the full blocks of `token_ids`, which follow the block of digest `parent`.

    token_ids: the first is the first of a block; a partial last block has no digest.
    """
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    data = ids.tobytes()
    block_bytes = block_size * ids.itemsize
    start = _block_state(block_bytes, key)
    digests = []
    for offset in range(0, len(data) - block_bytes + 1, block_bytes):
        state = start.copy()
        state.update(parent + data[offset : offset + block_bytes])
        parent = state.digest()
        digests.append(parent)
    return digests


def key_fingerprint(key: bytes) -> str:
    """Return what tells one secret key from another, as 16 hex digits; empty for the key that everybody knows."""
    return "" if key == DEFAULT_KEY else hashlib.blake2b(_KEY_TAG, digest_size=8, key=key).hexdigest()


@lru_cache(maxsize=8)
def _block_state(block_bytes: int, key: bytes) -> hashlib.blake2b:
    """Return a hash to copy for each block: a keyed BLAKE2b starts with a whole block of the key."""
    return hashlib.blake2b(_BLOCK_TAG + struct.pack("<Q", block_bytes), digest_size=DIGEST_BYTES, key=key)
