"""What a detokenizer process counts of its replica's requests, read where a scraper reads it."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import pytest_asyncio

from kvern.v1 import engine_pb2, inference_pb2
from tests.services.scraping import GRPC_SERVICE, Scrape, scrape, scrape_until

from .setup import MAX_STREAMS, Setup

pytestmark = pytest.mark.asyncio(loop_scope="package")

NAMES = GRPC_SERVICE | {
    "kvern_detokenizer_choices_total",
    "kvern_detokenizer_time_to_first_token_seconds",
    "kvern_detokenizer_request_duration_seconds",
    "kvern_detokenizer_streams",
    "kvern_detokenizer_max_streams",
    "kvern_detokenizer_parked",
    "kvern_detokenizer_parks_total",
    "kvern_detokenizer_sheds_total",
    "kvern_detokenizer_tokens_total",
    "kvern_detokenizer_text_bytes_total",
    "kvern_detokenizer_engine_connected",
    "kvern_detokenizer_predicted_wait_seconds",
}
REASONS = ("stop", "length", "abort", "error")


def choices(after: Scrape, before: Scrape) -> dict[str, float]:
    name = "kvern_detokenizer_choices_total"
    return {reason: after(name, reason=reason) - before(name, reason=reason) for reason in REASONS}


async def wait_idle(setup: Setup) -> Scrape:
    return await scrape_until(setup.status, lambda now: not now("kvern_detokenizer_streams"))


@pytest_asyncio.fixture(loop_scope="package")
async def before(setup: Setup) -> Scrape:
    return await wait_idle(setup)


async def test_every_metric_is_told_of_with_its_help_and_none_without_a_prefix(before: Scrape) -> None:
    before.assert_has(NAMES)
    assert before("kvern_detokenizer_engine_connected") == before("kvern_ready") == 1
    assert before("kvern_detokenizer_max_streams") == MAX_STREAMS


async def test_five_aborts_are_counted_once_each_as_aborts(setup: Setup, before: Scrape) -> None:
    """H02: three calls of which one has three choices; the engine's word that one ended comes too late."""
    calls = [await setup.begin(sampling=inference_pb2.Sampling(seed=9, n=n)) for n in (1, 3, 1)]
    assert (await scrape(setup.status))("kvern_detokenizer_streams") == 3
    for call, request_id in calls:
        call.call.cancel()
        assert await setup.aborted() == request_id
        setup.engine.end(request_id, inference_pb2.FINISH_REASON_ABORT)
    after = await wait_idle(setup)
    assert choices(after, before) == {"stop": 0, "length": 0, "abort": 5, "error": 0}
    method = {"method": "kvern.v1.ReplicaService/Serve", "code": "CANCELLED"}
    assert after("kvern_rpc_requests_total", **method) - before("kvern_rpc_requests_total", **method) == 3


async def test_choices_end_once_each_and_text_tokens_and_times_are_counted(setup: Setup, before: Scrape) -> None:
    call, request_id = await setup.begin(
        sampling=inference_pb2.Sampling(seed=9, n=3), stopping=inference_pb2.Stopping(stop=["END"])
    )
    text, stop = setup.ids(" word"), setup.ids(" END")
    ids = [request_id] * 3
    setup.engine.step(ids, [*text, *text, *stop], choices=[0, 1, 2], num_tokens=[len(text), len(text), len(stop)])
    failed = engine_pb2.ChoiceEnd(id=request_id, index=1, reason=inference_pb2.FINISH_REASON_ERROR, error="no numbers")
    setup.engine.step(ended=[engine_pb2.ChoiceEnd(id=request_id, reason=inference_pb2.FINISH_REASON_LENGTH), failed])
    await call.rest()
    after = await wait_idle(setup)
    assert choices(after, before) == {"stop": 1, "length": 1, "abort": 0, "error": 1}
    for name, more in (
        ("tokens_total", 2 * len(text) + len(stop)),
        ("text_bytes_total", len(" word word ")),
        ("time_to_first_token_seconds_count", 1),
        ("request_duration_seconds_count", 1),
        ("sheds_total", 0),
    ):
        assert after(f"kvern_detokenizer_{name}") - before(f"kvern_detokenizer_{name}") == more, name


async def test_engine_that_goes_fails_its_choices_and_one_call_too_many_is_shed(setup: Setup, before: Scrape) -> None:
    calls = [await setup.begin() for _ in range(MAX_STREAMS)]
    assert (await setup.serve().error())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    setup.engine.says_hello.clear()
    setup.engine.hang_up()
    ends = await asyncio.gather(*(call.error() for call, _ in calls))
    assert {code for code, _ in ends} == {grpc.StatusCode.UNAVAILABLE}
    after = await wait_idle(setup)
    assert (after("kvern_detokenizer_engine_connected"), after("kvern_ready")) == (0, 0)
    assert choices(after, before) == {"stop": 0, "length": 0, "abort": 0, "error": MAX_STREAMS}
    sheds = "kvern_detokenizer_sheds_total"
    assert after(sheds, reason="RESOURCE_EXHAUSTED") - before(sheds, reason="RESOURCE_EXHAUSTED") == 1
