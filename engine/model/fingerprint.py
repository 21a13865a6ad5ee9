"""A cheap fingerprint of weights, so that KV computed with other ones is never taken for the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvern.engine.errors import ModelError

_HEADER_BYTES = 1 << 20
_NUM_SAMPLES = 1024
_SAMPLE_BYTES = 1024


def model_fingerprint(identity: str, weight_files: list[Path]) -> str:
    """Return 32 hex digits over `identity`, which says all of the model but the weights, and its weight files.

    Of each file: name, size, the first MiB (names, types and shapes of the tensors, quantization among them), and a
    thousand samples of a KiB, evenly spaced. Two fine-tunes of one model differ almost everywhere, so they differ in
    the samples; files that differ in a few bytes only may not. Reading all of a large model would cost a minute.
    Raises ModelError.
    """
    digest = hashlib.blake2b(identity.encode(), digest_size=16)
    for path in weight_files:
        try:
            _update(digest, path)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
    return digest.hexdigest()


def _update(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"\0{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEADER_BYTES))
        for sample in range(_NUM_SAMPLES):
            file.seek(size * sample // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
