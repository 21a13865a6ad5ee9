"""What a router process counts of requests, read where a scraper reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvern.services.runtime.errors import ResourceExhausted, Unavailable
from kvern.v1 import inference_pb2, replica_pb2
from tests.services.scraping import GRPC_SERVICE, Samples, Scrape, scrape, scrape_until

from . import scripted
from .scripted import MODEL
from .setup import MAX_STREAMS, Setup
from .test_router import failure, texts

pytestmark = pytest.mark.asyncio(loop_scope="module")

WITHOUT_REDIS = GRPC_SERVICE | {
    "kvern_router_requests_total",
    "kvern_router_time_to_first_token_seconds",
    "kvern_router_inter_token_latency_seconds",
    "kvern_router_request_duration_seconds",
    "kvern_router_demand",
    "kvern_router_requests_running",
    "kvern_router_requests_waiting",
    "kvern_router_streams",
    "kvern_router_max_streams",
    "kvern_router_prompt_tokens_total",
    "kvern_router_cached_tokens_total",
    "kvern_router_generated_tokens_total",
    "kvern_router_predicted_cached_tokens_total",
    "kvern_router_predictions_total",
    "kvern_router_prediction_error_tokens",
    "kvern_router_index_lookups_total",
    "kvern_router_index_lookup_seconds",
    "kvern_router_tokenize_seconds",
    "kvern_router_placement_seconds",
    "kvern_router_migrations_total",
    "kvern_router_retries_total",
    "kvern_router_retries_refused_total",
    "kvern_router_hedges_total",
    "kvern_router_poisoned_total",
    "kvern_router_sheds_total",
    "kvern_router_replicas",
    "kvern_router_tokenizer_up",
}
OF_REDIS = {"kvern_router_redis_up", "kvern_router_registry_age_seconds"}

GENERATE = "kvern.v1.InferenceService/Generate"

Frames = AsyncIterator[replica_pb2.ServeResponse]


def told(token_id: int, *, finished: bool = False) -> replica_pb2.ServeResponse:
    event = inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="x"))
    if finished:
        event = inference_pb2.GenerateResponse(finished=inference_pb2.Finished())
    frame = scripted.frame(event)
    frame.updates.add(new_token_ids=[token_id], text_bytes_total=1, finished=finished)
    return frame


async def three_tokens(request: inference_pb2.GenerateRequest) -> Frames:
    yield scripted.started(request)
    yield scripted.scheduled(2)
    yield told(1)
    yield told(2)
    yield told(3, finished=True)


async def wait_idle(setup: Setup) -> Scrape:
    return await scrape_until(
        setup.status, lambda now: not now("kvern_router_demand") and not now("kvern_router_streams")
    )


@pytest_asyncio.fixture(loop_scope="module")
async def before(setup: Setup) -> Scrape:
    return await wait_idle(setup)


async def test_every_metric_is_told_of_with_its_help_and_none_without_a_prefix(setup: Setup) -> None:
    (await scrape(setup.status)).assert_has(WITHOUT_REDIS, absent=OF_REDIS)


async def test_served_model_reads_0_before_its_first_request(before: Scrape) -> None:
    """What scales by demand must not take no data for no need."""
    names = {(name, dict(labels).get("model")) for name, labels in before.samples}
    for name in ("demand", "requests_running", "requests_waiting", "migrations_total", "generated_tokens_total"):
        assert (f"kvern_router_{name}", MODEL) in names
    assert before("kvern_router_replicas", model=MODEL, state="ready") == 4
    assert before("kvern_router_replicas") == 4
    assert before("kvern_router_max_streams") == MAX_STREAMS
    assert before("kvern_router_tokenizer_up") == before("kvern_ready") == 1


async def test_request_is_counted_once_with_its_tokens_and_times(setup: Setup, before: Scrape) -> None:
    """H04."""
    setup.behave(three_tokens)
    await texts(setup.generate("Hello"))
    calls = {"name": "kvern_rpc_requests_total", "method": GENERATE, "code": "OK"}
    after = await scrape_until(setup.status, lambda now: now(**calls) == before(**calls) + 1)

    def more(name: str, **labels: str) -> float:
        return after(f"kvern_router_{name}", **labels) - before(f"kvern_router_{name}", **labels)

    assert more("requests_total") == more("requests_total", model=MODEL, code="OK") == 1
    counts = ("prompt_tokens_total", "cached_tokens_total", "generated_tokens_total")
    assert [more(name, model=MODEL) for name in counts] == [5, 2, 3]
    for name, times in (("time_to_first_token", 1), ("inter_token_latency", 2), ("request_duration", 1)):
        assert more(f"{name}_seconds_count", model=MODEL) == times
    assert more("tokenize_seconds_count") == more("placement_seconds_count") == 1
    assert more("predictions_total") == 0  # nobody asked an index


async def test_each_end_is_counted_by_its_code(setup: Setup, before: Scrape) -> None:
    await failure(setup.generate(""))
    await failure(setup.generate(model="huge"))
    setup.behave(scripted.stall_after_start)
    cancelled = setup.generate()
    await cancelled.read()
    cancelled.cancel()
    await failure(setup.generate(timeout=2.5))
    setup.behave(scripted.fail)
    await failure(setup.generate())
    calls = {"name": "kvern_rpc_requests_total", "method": GENERATE}
    after = await scrape_until(setup.status, lambda now: now(**calls) == before(**calls) + 5)
    for name, labels in (("kvern_router_requests_total", {}), ("kvern_rpc_requests_total", {"method": GENERATE})):
        for code in ("INVALID_ARGUMENT", "NOT_FOUND", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL"):
            assert after(name, code=code, **labels) - before(name, code=code, **labels) == 1, (name, code)
        assert after(name, **labels) - before(name, **labels) == 5
    assert after("kvern_router_requests_total", model="other", code="NOT_FOUND") == 1


async def test_demand_counts_requests_without_a_replica_and_with_one(setup: Setup, before: Scrape) -> None:
    setup.tokenizer.hangs = True
    try:
        waiting = [setup.generate(), setup.generate(model=MODEL)]
        now = await scrape_until(setup.status, lambda now: now("kvern_router_requests_waiting", model=MODEL) == 2)
        assert (now("kvern_router_demand", model=MODEL), now("kvern_router_requests_running")) == (2, 0)
    finally:
        setup.tokenizer.hangs = False
    for call in waiting:
        call.cancel()
    setup.behave(scripted.stall_after_start)
    running = setup.generate()
    await running.read()
    now = await scrape_until(setup.status, lambda now: not now("kvern_router_requests_waiting"))
    assert now("kvern_router_demand", model=MODEL) == now("kvern_router_requests_running", model=MODEL) == 1
    assert now("kvern_router_streams") == 1
    running.cancel()
    await wait_idle(setup)


async def test_stream_between_two_replicas_is_demand_that_waits(setup: Setup) -> None:
    only = setup.replicas[0]
    await setup.use(only)

    async def begin_and_vanish(request: inference_pb2.GenerateRequest) -> Frames:
        yield scripted.started(request)
        yield told(1)
        only.answers_polls = False
        raise Unavailable("gone")

    setup.behave(begin_and_vanish)
    call = setup.generate()
    reading = asyncio.create_task(texts(call))
    now = await scrape_until(
        setup.status, lambda now: now("kvern_router_replicas", model=MODEL, state="unreachable") == 1
    )
    names = ("demand", "requests_waiting", "requests_running")
    assert [now(f"kvern_router_{name}", model=MODEL) for name in names] == [1, 1, 0]
    assert now("kvern_router_replicas", model=MODEL, state="ready") == 0
    assert now("kvern_router_replicas", model=MODEL, state="draining") == 3
    call.cancel()
    await asyncio.wait([reading])
    await wait_idle(setup)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Unavailable("gone"), "unavailable"), (Unavailable("this replica drains", reason="DRAINING"), "drained")],
)
async def test_moved_stream_is_one_request_and_its_gap_a_time_between_tokens(
    setup: Setup, before: Scrape, error: Unavailable, reason: str
) -> None:
    async def break_once(request: inference_pb2.GenerateRequest) -> Frames:
        if request.HasField("resume"):
            yield told(2)
            yield told(3, finished=True)
            return
        yield scripted.started(request)
        yield scripted.scheduled(0)
        yield told(1)
        first_tokens = "kvern_router_time_to_first_token_seconds_count"
        await scrape_until(setup.status, lambda now: now(first_tokens) == before(first_tokens) + 1)
        await asyncio.sleep(0.25)
        raise error

    setup.behave(break_once)
    await texts(setup.generate())
    after = await wait_idle(setup)
    for name, more in (
        ("requests_total", 1),
        ("migrations_total", 1),
        ("time_to_first_token_seconds_count", 1),
        ("inter_token_latency_seconds_count", 2),
        ("prompt_tokens_total", 2),
        ("generated_tokens_total", 3),
        ("retries_total", 0),
    ):
        assert after(f"kvern_router_{name}") - before(f"kvern_router_{name}") == more, name
    migrations = {"name": "kvern_router_migrations_total", "model": MODEL, "reason": reason}
    assert after(**migrations) - before(**migrations) == 1
    gaps = "kvern_router_inter_token_latency_seconds_sum"
    assert after(gaps) - before(gaps) > 0.1  # the first token may come late


async def test_retries_refusals_and_poison_are_told_apart(setup: Setup, before: Scrape) -> None:
    async def begin_and_break(request: inference_pb2.GenerateRequest) -> Frames:
        yield scripted.started(request)
        raise Unavailable("gone")

    async def be_full(request: inference_pb2.GenerateRequest) -> Frames:
        raise ResourceExhausted("full", retry_after_s=1)
        yield scripted.started(request)

    setup.behave(begin_and_break)
    await failure(setup.generate())
    await setup.all_ready()
    setup.behave(be_full)
    await failure(setup.generate())
    setup.behave(scripted.stall_after_start)
    calls = [setup.generate() for _ in range(MAX_STREAMS)]
    for call in calls:
        await call.read()
    await failure(setup.generate())
    for call in calls:
        call.cancel()
    after = await wait_idle(setup)
    for name, labels, more in (
        ("poisoned_total", {}, 1),
        ("migrations_total", {"reason": "unavailable"}, 1),
        ("retries_total", {}, 1),
        ("retries_refused_total", {}, 0),
        ("sheds_total", {"reason": "RESOURCE_EXHAUSTED"}, 2),
        ("sheds_total", {}, 2),
    ):
        assert after(f"kvern_router_{name}", **labels) - before(f"kvern_router_{name}", **labels) == more, name


async def test_series_do_not_grow_with_what_clients_name(setup: Setup) -> None:
    """H08: 1,000 models, request ids and sessions, and methods that do not exist."""

    async def name_things(number: int) -> None:
        await failure(setup.generate(model=f"model-{number}", request_id=f"request-{number}", session_id=f"s-{number}"))
        if number % 50 == 0:
            await texts(setup.generate(request_id=f"served-{number}", session_id=f"tenant-{number}"))

    await name_things(0)
    before = await wait_idle(setup)
    for number in range(1, 1000):
        await name_things(number)
    after = await wait_idle(setup)
    assert after.samples.keys() == before.samples.keys()
    assert after("kvern_router_requests_total", model="other", code="NOT_FOUND") >= 1000


async def test_counters_never_fall_while_requests_run(setup: Setup) -> None:
    """H07: one process exports."""
    setup.behave(three_tokens)
    last: Samples = {}
    for _ in range(20):
        now, *_ = await asyncio.gather(scrape(setup.status), *(texts(setup.generate()) for _ in range(3)))
        counters = {
            key: value
            for family in now.families.values()
            if family.type in ("counter", "histogram")
            for key, value in Scrape.samples_of(family).items()
        }
        assert counters.keys() >= last.keys()
        assert [key for key, value in last.items() if counters[key] < value] == []
        last = counters
