"""When an engine's step takes so long that something must be wrong. One rule, for all who judge it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StallRule:
    """A step that takes `factor` times what is expected of it, and `min_s` seconds at least, is stuck; where nothing is
    expected, one that takes `unknown_s` seconds. `dead_factor` times later only a restart helps."""

    min_s: float = 5.0
    factor: float = 10.0
    unknown_s: float = 60.0
    dead_factor: float = 6.0

    def limit_s(self, expected_s: float) -> float:
        """Return how long a step may take, in seconds. expected_s: 0 where nothing is expected."""
        return max(self.min_s, self.factor * expected_s) if expected_s else self.unknown_s

    def is_stuck(self, step_age_s: float, expected_s: float) -> bool:
        """step_age_s: since the last step ended; 0 where there is nothing to do."""
        return step_age_s > self.limit_s(expected_s)

    def is_dead(self, step_age_s: float, expected_s: float) -> bool:
        return step_age_s > self.dead_factor * self.limit_s(expected_s)


STALL_RULE = StallRule()
