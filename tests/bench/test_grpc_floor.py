"""The benchmark of gRPC's own cost brings every message, and its processes end."""

from __future__ import annotations

from multiprocessing import active_children

import pytest
from grpc_floor import measure


def test_both_ends_pay_for_messages_and_end() -> None:
    before = active_children()
    costs = measure(num_streams=4, num_bursts=3)
    assert set(costs) == {"server", "client"}
    assert all(0 < cost < 1e6 for cost in costs.values())
    assert set(active_children()) <= set(before)


def test_end_whose_other_end_dies_is_ended() -> None:
    before = active_children()
    with pytest.raises(EOFError):
        measure(num_streams=1, num_bursts=0)  # without a message there is no cost of one
    assert set(active_children()) <= set(before)
