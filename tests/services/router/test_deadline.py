from __future__ import annotations

import pytest

from kvern.services.router.deadline import for_replica, for_tokenizer


def test_each_hop_gets_what_is_left_less_its_share() -> None:
    assert for_tokenizer(10.0) == 5.0
    assert for_replica(10.0) == pytest.approx(9.95)
    assert for_replica(0.1) == pytest.approx(0.09)


def test_without_a_deadline_no_hop_has_one() -> None:
    assert for_tokenizer(None) is None
    assert for_replica(None) is None
