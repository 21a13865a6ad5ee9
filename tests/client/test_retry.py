"""A call that found no server is made again, within bounds."""

from __future__ import annotations

import time

import grpc
import pytest

from kvern.client import Client, Delta, Finished, KvernError, RetryPolicy, Started, TimedOut, Unreachable
from kvern.services.runtime.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from kvern.v1 import inference_pb2 as pb
from tests.up_process import free_port

from .conftest import IMPATIENT, Run, Serve
from .scripted_server import SEED, delta, finished, responds, scheduled, started

AWAY = Unavailable("no replica is ready")
ANSWER = responds(started(), scheduled(), delta("Hi", 1), finished())


def test_call_that_found_no_replica_is_made_again(run: Run, serve: Serve) -> None:
    server = serve(responds(AWAY), responds(AWAY), ANSWER)
    assert [type(event) for event in run(server)] == [Started, pb.Scheduled, Delta, Finished]
    assert len(server.received) == 3


def test_stream_that_broke_before_its_first_delta_begins_anew_with_the_seed_it_told(run: Run, serve: Serve) -> None:
    server = serve(
        responds(started(), AWAY), responds(started(request_id="r2"), scheduled(), delta("Hi", 1), finished())
    )
    assert [type(event) for event in run(server)] == [Started, pb.Scheduled, Delta, Finished]
    assert not server.received[1].HasField("resume")
    assert server.received[1].sampling.seed == SEED


def test_retries_are_bounded(run: Run, serve: Serve) -> None:
    server = serve(responds(AWAY))
    with pytest.raises(KvernError, match="no replica is ready") as failed:
        run(server, retry=RetryPolicy(max_retries=2, first_delay_s=0.001))
    assert failed.value.code is grpc.StatusCode.UNAVAILABLE
    assert len(server.received) == 3


def test_full_server_is_asked_again_after_the_delay_it_named(run: Run, serve: Serve) -> None:
    server = serve(responds(ResourceExhausted("full", retry_after_s=0.05)), ANSWER)
    start = time.monotonic()
    assert len(run(server)) == 4
    assert time.monotonic() - start > 0.05


@pytest.mark.parametrize("limit", ["timeout_s", "first_token_timeout_s"])
def test_full_server_is_not_waited_for_beyond_the_time_limit(run: Run, serve: Serve, limit: str) -> None:
    server = serve(responds(ResourceExhausted("full", retry_after_s=600.0)))
    with pytest.raises(KvernError) as refused:
        run(server, **{limit: 60.0})
    assert (refused.value.code, refused.value.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 600.0)


@pytest.mark.timeout(60)
def test_server_that_names_no_delay_is_not_asked_again(run: Run, serve: Serve) -> None:
    """As gRPC itself, where a message is larger than it takes. A second call would come after minutes."""
    server = serve(ANSWER, options=[("grpc.max_receive_message_length", 100)])
    with pytest.raises(KvernError, match="larger than max") as refused:
        run(server, pb.GenerateRequest(text="x" * 200), retry=RetryPolicy(first_delay_s=600, max_delay_s=600))
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("verdict", [InvalidArgument("text", "must not be empty"), NotFound("no model 'x'")])
def test_refused_call_is_not_made_again(run: Run, serve: Serve, verdict: Exception) -> None:
    server = serve(responds(verdict))
    with pytest.raises(KvernError, match=verdict.message):
        run(server)
    assert len(server.received) == 1


def test_nobody_at_the_address_is_unreachable() -> None:
    address = f"127.0.0.1:{free_port()}"
    with Client(address, retry=IMPATIENT) as client:
        with pytest.raises(Unreachable, match=f"no Kvern at {address}"):
            client.list_models()
        with pytest.raises(Unreachable, match=f"no Kvern at {address}"):
            next(client.generate("Hi"))


def test_simple_call_is_made_again_too(serve: Serve) -> None:
    server = serve(ANSWER)
    server.num_failures = 3
    with Client(server.address, retry=IMPATIENT) as client:
        assert list(client.tokenize("Hi").ids) == [72, 105]


def test_simple_call_has_a_time_limit(serve: Serve) -> None:
    server = serve(ANSWER)
    server.stalls = True
    with Client(server.address) as client, pytest.raises(TimedOut, match="within timeout_s"):
        client.tokenize("Hi", timeout_s=0.05)


def test_delays_double_up_to_a_bound_and_are_spread() -> None:
    policy = RetryPolicy(first_delay_s=0.1, max_delay_s=1.0)
    for num_failures, step_s in [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (2000, 1.0)]:
        delays = {policy.delay_s(num_failures) for _ in range(20)}
        assert all(step_s / 2 <= delay <= step_s for delay in delays)
        assert len(delays) > 1
