from __future__ import annotations

import pytest

from kvern.services.runtime.deadline import DEADLINE_UNREACHABLE, check_reachable
from kvern.services.runtime.errors import ResourceExhausted


def test_request_that_cannot_begin_in_time_is_refused_with_the_wait() -> None:
    with pytest.raises(ResourceExhausted, match=r"the deadline is in 2 s, the wait is about 5 s") as refused:
        check_reachable(5.0, 2.0)
    assert (refused.value.reason, refused.value.retry_after_s) == (DEADLINE_UNREACHABLE, 5.0)


def test_request_that_may_begin_in_time_or_has_no_deadline_is_taken() -> None:
    check_reachable(5.0, 3.0)
    check_reachable(1e9, None)
    check_reachable(0.0, 0.001)
