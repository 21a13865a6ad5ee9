"""Why credentials are not taken. Callers are not told: whoever tries keys learns nothing from it."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """What operators are told, in a metric."""

    MISSING = "missing"
    MALFORMED = "malformed"
    """Nothing that could be a key or a token of ours."""
    UNKNOWN = "unknown"
    """No such key, and no such key of the issuer."""
    INVALID = "invalid"
    """A token with a wrong signature, issuer, audience, time or claim."""
    EXPIRED = "expired"


class Rejected(Exception):
    """Credentials are not taken."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause
