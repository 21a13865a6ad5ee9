"""Secrets in files: one a file, read at start."""

from __future__ import annotations

import hmac
from pathlib import Path

from kvern.services.runtime.settings import SettingsError

MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4096


def read_secret(path: Path, setting: str) -> bytes:
    """Return a file's contents without the white space around it. `setting` is who names the file.

    Raises SettingsError where it cannot be read, is too short to be a secret, or no file for one.
    """
    try:
        with path.open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise SettingsError(f"{setting}: cannot read {path}: {error.strerror}") from error
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise SettingsError(
            f"{setting}: {path} must hold {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes of a random secret"
        )
    return secret


def read_digest_key(path: Path) -> bytes:
    """Return the key of block digests that a secret stands for. Raises SettingsError as `read_secret` does."""
    return hmac.digest(read_secret(path, "digest_key_file"), b"kvern block digests", "sha256")
