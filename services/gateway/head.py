"""What all chunks of an answer begin with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Head:
    """Which answer it is, and whose."""

    id: str
    model: str = ""
    """Known once a router has taken the request."""
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str) -> dict[str, Any]:
        """Return it with the kind of object that it heads."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
