from __future__ import annotations

import pytest

from kvern.services.runtime.stall import STALL_RULE


@pytest.mark.parametrize(
    ("step_age_s", "expected_s", "is_stuck", "is_dead"),
    [
        (0.0, 0.0, False, False),
        (4.9, 0.01, False, False),
        (5.1, 0.01, True, False),
        (9.0, 1.0, False, False),
        (10.1, 1.0, True, False),
        (30.1, 0.01, True, True),
        (59.0, 0.0, False, False),
        (61.0, 0.0, True, False),
        (361.0, 0.0, True, True),
    ],
)
def test_step_is_stuck_far_beyond_what_is_expected_and_dead_six_times_later(
    step_age_s: float, expected_s: float, is_stuck: bool, is_dead: bool
) -> None:
    assert STALL_RULE.is_stuck(step_age_s, expected_s) is is_stuck
    assert STALL_RULE.is_dead(step_age_s, expected_s) is is_dead
