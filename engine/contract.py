"""The cache contract: a fingerprint of all that must agree for one process's KV to be another's."""

from __future__ import annotations

import hashlib

from kvern.engine.block_hash import DIGEST_VERSION


def cache_contract(
    *, model_fingerprint: str, dtype: str, kv_dtype: str, block_size: int, kv_scales: bytes = b""
) -> str:
    """Return the contract as 32 hex digits.

    model_fingerprint: over weights and what of the model's config changes its KV: rope settings and quantization are
    among it. kv_scales: of keys and values in fp8, as float32.
    """
    fields = (str(DIGEST_VERSION), model_fingerprint, dtype, kv_dtype, str(block_size), kv_scales.hex())
    return hashlib.blake2b("\0".join(fields).encode(), digest_size=16).hexdigest()
