"""Salts that keep tenants' cached prompts apart."""

from __future__ import annotations

import hashlib
import hmac
import struct


class Salts:
    """Derives from one secret what stands for tenants where others can see it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._name_key = hmac.digest(secret, b"kvern tenant names", "sha256")

    def salt(self, tenant: str, client_salt: str = "") -> str:
        """Return the salt of a tenant's requests, as 64 hex digits.

        No two pairs have the same, and without the secret nobody can choose a client's salt that makes another
        tenant's.
        """
        name = tenant.encode()
        message = struct.pack("<Q", len(name)) + name + client_salt.encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()

    def alias(self, tenant: str) -> str:
        """Return what stands for a tenant's name in Redis, as 32 hex digits."""
        return hmac.new(self._name_key, tenant.encode(), hashlib.sha256).hexdigest()[:32]
