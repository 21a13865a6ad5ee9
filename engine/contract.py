"""The cache contract: a fingerprint of all that must agree for one process's KV to be another's."""

from __future__ import annotations

import hashlib

from kvern.engine.block_hash import DEFAULT_KEY, DIGEST_VERSION, key_fingerprint


def cache_contract(
    *,
    model_fingerprint: str,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    kv_scales: bytes = b"",
    digest_key: bytes = DEFAULT_KEY,
) -> str:
    """Return the contract as 32 hex digits.

    model_fingerprint: over weights and what of the model's config changes its KV: rope settings and quantization are
    among it. kv_scales: of keys and values in fp8, as float32. digest_key: replicas of different ones never find each
    other's blocks, so they are of different pools.
    """
    digests = (str(DIGEST_VERSION), key_fingerprint(digest_key))
    fields = (*digests, model_fingerprint, dtype, kv_dtype, str(block_size), kv_scales.hex())
    return hashlib.blake2b("\0".join(fields).encode(), digest_size=16).hexdigest()
