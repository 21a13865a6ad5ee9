"""The benchmark of gRPC's own cost brings every message, and its processes end."""

from __future__ import annotations

import multiprocessing

from grpc_floor import measure


def test_both_ends_pay_for_messages_and_end() -> None:
    costs = measure(num_streams=4, num_bursts=3)
    assert set(costs) == {"server", "client"}
    assert all(0 < cost < 1e6 for cost in costs.values())
    assert not multiprocessing.active_children()
