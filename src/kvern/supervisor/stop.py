"""How a set is told to end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StopRequest:
    """Set from elsewhere, a signal handler even: plain attributes, because handlers may not take locks."""

    requested: bool = False
    """Drain and end."""

    forced: bool = False
    """Kill what is left."""
