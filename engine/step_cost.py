"""What a step costs, learnt from the steps seen: the base of the step-time target."""

from __future__ import annotations

_FORGET_DECODE, _FORGET_PREFILL = 0.98, 0.9
"""Weight of all earlier steps of a kind against the newest: contexts grow, machines get busy. Within one long prompt a
token's cost doubles and more."""

_LEAST_VARIANCE = 0.01
"""Of numbers of decodes: below it nothing is known of what one more costs."""


class StepCost:
    """seconds = base + per_decode * num_decodes + per_prefill_token * num_prefill_tokens, none of them below zero.

    Base and decodes are learnt from steps without prefill alone, a prefill token from what the others take longer. So
    what is known of one kind does not fade while only the other runs, and what a first step takes for a start is not
    mistaken for what each one does.
    """

    def __init__(self) -> None:
        self._decodes = _Line()
        self._prefill_s = self._num_prefill_tokens = 0.0

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        if num_prefill_tokens == 0:
            self._decodes.observe(num_decodes, seconds)
            return
        prefill_s = max(0.0, seconds - self._decodes.at(num_decodes))
        self._prefill_s = _FORGET_PREFILL * self._prefill_s + prefill_s
        self._num_prefill_tokens = _FORGET_PREFILL * self._num_prefill_tokens + num_prefill_tokens

    def expected_s(self, num_decodes: int, num_prefill_tokens: int) -> float | None:
        """Return how long a step should take. None: no step of its kind has been seen."""
        if num_prefill_tokens == 0:
            return self._decodes.at(num_decodes) if self._decodes.is_known else None
        if self._num_prefill_tokens == 0:
            return None
        return self._decodes.at(num_decodes) + num_prefill_tokens * self._per_prefill_token_s

    def max_prefill_tokens(self, num_decodes: int, target_s: float) -> int | None:
        """Return how many prefill tokens fit a step of `target_s` seconds. None: nothing is known yet.

        0 where the decodes alone take that long.
        """
        if self._prefill_s == 0:
            return None
        return max(0, int((target_s - self._decodes.at(num_decodes)) / self._per_prefill_token_s))

    @property
    def _per_prefill_token_s(self) -> float:
        return self._prefill_s / self._num_prefill_tokens


class _Line:
    """A line through points by least squares, with exponential forgetting, neither end below zero. Zero at first."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def observe(self, x: float, y: float) -> None:
        self._weight = _FORGET_DECODE * self._weight + 1
        self._x = _FORGET_DECODE * self._x + x
        self._y = _FORGET_DECODE * self._y + y
        self._xx = _FORGET_DECODE * self._xx + x * x
        self._xy = _FORGET_DECODE * self._xy + x * y

    def at(self, x: float) -> float:
        if not self.is_known:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if variance > _LEAST_VARIANCE:
            slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / variance)
        if slope * mean_x > mean_y:
            return mean_y / mean_x * x
        return mean_y + slope * (x - mean_x)
