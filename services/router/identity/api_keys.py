"""API keys: random secrets that callers show, of which a file holds hashes.

A plain SHA-256 is enough. A slow, salted hash protects secrets that people choose, which can be guessed; a key is 256
random bits, which nobody guesses, however fast the hash. And a slow one would let anybody who sends wrong keys take the
router's time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from kvern.services.router.identity.caller import USERS, Caller, Name, Role
from kvern.services.router.identity.rejection import Cause, Rejected
from kvern.services.runtime.reloaded_file import parse_yaml

MAX_KEY_CHARS = 256
MAX_KEYS = 10_000


class KeyEntry(BaseModel):
    """What the file says of one key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Name
    """In logs it stands for the key."""
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    """Of the whole key, in hex."""
    tenant: Name
    roles: frozenset[Role] = USERS
    expires_at: AwareDatetime | None = None

    @property
    def caller(self) -> Caller:
        return Caller(f"key:{self.id}", self.tenant, self.roles)


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[KeyEntry] = Field(max_length=MAX_KEYS)

    @model_validator(mode="after")
    def _are_distinct(self) -> Self:
        for name, values in (("id", {each.id for each in self.keys}), ("sha256", {each.sha256 for each in self.keys})):
            if len(values) < len(self.keys):
                raise ValueError(f"two keys have the same {name}")
        return self


class ApiKeys:
    """All keys by their hashes.

    A look-up takes the hash of what was shown. How long it takes can tell of that hash only, which nobody can steer
    towards one in the file without knowing its key.
    """

    def __init__(self, entries: Mapping[str, KeyEntry]) -> None:
        self._entries = entries

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises ValueError."""
        return cls({entry.sha256: entry for entry in parse_yaml(data, _KeyFile).keys})

    def identify(self, key: str) -> Caller:
        """Return whose key this is. Raises Rejected."""
        if len(key) > MAX_KEY_CHARS:
            raise Rejected(Cause.MALFORMED)
        entry = self._entries.get(hash_of(key))
        if entry is None:
            raise Rejected(Cause.UNKNOWN)
        if entry.expires_at is not None and entry.expires_at <= datetime.now(UTC):
            raise Rejected(Cause.EXPIRED)
        return entry.caller


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
