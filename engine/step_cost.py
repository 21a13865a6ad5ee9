"""What a step costs, learnt from the steps seen: the base of the step-time target."""

from __future__ import annotations

_FORGET = 0.98
"""Weight of all earlier steps against the newest: contexts grow, machines get busy."""

_PRIOR_VARIANCE = 1e4


class StepCost:
    """seconds = base + per_decode * num_decodes + per_prefill_token * num_prefill_tokens, by recursive least squares
    with exponential forgetting.

    Source: any text on adaptive filters, for example Haykin, Adaptive Filter Theory, chapter 10.
    """

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[_PRIOR_VARIANCE * (i == j) for j in range(3)] for i in range(3)]
        self._has_steps = False
        self._has_prefill = False

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from one step. Milliseconds inside, so that the numbers are near 1."""
        x = [1.0, num_decodes / 10, num_prefill_tokens / 100]
        px = [sum(row[j] * x[j] for j in range(3)) for row in self._covariance]
        gain_scale = 1.0 / (_FORGET + sum(x[i] * px[i] for i in range(3)))
        error = 1000 * seconds - sum(self._weights[i] * x[i] for i in range(3))
        for i in range(3):
            self._weights[i] += gain_scale * px[i] * error
            for j in range(3):
                # Bounded: with one kind of step for long, the unseen directions would grow without end.
                value = (self._covariance[i][j] - gain_scale * px[i] * px[j]) / _FORGET
                self._covariance[i][j] = max(-_PRIOR_VARIANCE, min(_PRIOR_VARIANCE, value))
        self._has_steps = True
        self._has_prefill = self._has_prefill or num_prefill_tokens > 0

    def expected_s(self, num_decodes: int, num_prefill_tokens: int) -> float | None:
        """Return how long a step should take. None: no step of its kind has been seen."""
        if not self._has_steps or (num_prefill_tokens and not self._has_prefill):
            return None
        x = (1.0, num_decodes / 10, num_prefill_tokens / 100)
        return sum(max(0.0, self._weights[i]) * x[i] for i in range(3)) / 1000

    def max_prefill_tokens(self, num_decodes: int, target_s: float) -> int | None:
        """Return how many prefill tokens fit a step of `target_s` seconds. None: nothing is known yet.

        0 where the decodes alone take that long.
        """
        per_token_ms = self._weights[2] / 100
        if not self._has_prefill or per_token_ms <= 0:
            return None
        spent_ms = max(0.0, self._weights[0]) + max(0.0, self._weights[1]) / 10 * num_decodes
        return max(0, int((1000 * target_s - spent_ms) / per_token_ms))
