"""Which requests a limit counts together."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Kinds of requests. Each has a limit's number for itself: who generates as much as it may can still tokenize."""

    GENERATE = "generate"
    OTHER = "other"


class Line(NamedTuple):
    """A tenant's requests of one kind."""

    tenant: str
    """What stands for it in Redis."""
    kind: Kind
