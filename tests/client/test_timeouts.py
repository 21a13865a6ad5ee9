"""Time limits, of the whole and of the first token."""

from __future__ import annotations

import threading

import grpc
import pytest

from kvern.client import Delta, TimedOut
from kvern.services.runtime.errors import Unavailable
from tests.up_process import PATIENCE_S

from .conftest import Run, Serve
from .scripted_server import ScriptedServer, delta, finished, responds, scheduled, stalls_after, started

SHORT_S = 0.2
KEPT_S = 2.0
"""A limit that is kept, even by a machine that is busy for a moment."""


def _has_no_call_left(server: ScriptedServer) -> bool:
    """Wait until a call has ended. On a busy machine none may have come within SHORT_S."""
    return not server.received or server.ended.wait(PATIENCE_S)


def test_generation_that_takes_longer_than_its_time_ends(run: Run, serve: Serve) -> None:
    server = serve(stalls_after(started(), delta("a", 1)))
    with pytest.raises(TimedOut, match="not done within timeout_s") as late:
        run(server, timeout_s=SHORT_S)
    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert _has_no_call_left(server)


def test_server_knows_the_time_limit(run: Run, serve: Serve) -> None:
    server = serve(responds(started(), finished()))
    run(server, timeout_s=60.0)
    assert server.time_remaining_s is not None
    assert 50 < server.time_remaining_s < 61  # gRPC rounds deadlines to tenths of a second


def test_time_runs_over_all_calls_of_a_generation(run: Run, serve: Serve) -> None:
    """A second call does not begin it anew."""

    def break_late(ended: threading.Event):
        yield started()
        yield delta("a", 1)
        ended.wait(0.3 * KEPT_S)
        raise Unavailable("away")

    server = serve(break_late, responds(started(), finished()))
    run(server, timeout_s=KEPT_S)
    assert server.time_remaining_s is not None
    # Much less: for a time a little less than one that it has sent, gRPC sends that one again.
    assert server.time_remaining_s < 0.85 * KEPT_S


def test_first_token_that_takes_longer_than_its_time_ends_the_call(run: Run, serve: Serve) -> None:
    server = serve(stalls_after(started(), scheduled()))
    with pytest.raises(TimedOut, match="no token within first_token_timeout_s") as late:
        run(server, first_token_timeout_s=SHORT_S)
    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert _has_no_call_left(server)
    assert len(server.received) <= 1


def test_first_token_limit_ends_with_the_first_token(run: Run, serve: Serve) -> None:
    """Even of one whose text is not complete, which the caller does not see."""

    def go_on_late(ended: threading.Event):
        yield started()
        yield delta("", 1)
        ended.wait(KEPT_S + SHORT_S)
        yield delta("ď", 2)
        yield finished()

    events = run(serve(go_on_late), first_token_timeout_s=KEPT_S)
    assert [event.text for event in events if isinstance(event, Delta)] == ["ď"]
