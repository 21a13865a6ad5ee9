"""Readers that do not keep up: what they may hold up, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
import pytest_asyncio

from kvern.services.runtime.channel import open_channel
from kvern.v1 import engine_pb2, inference_pb2, inference_pb2_grpc
from tests.services.scraping import scrape, scrape_until

from .scripted_engine import ScriptedEngine
from .setup import SERVING, TIMEOUT_S, Setup, details_of, detokenizing, finished_of, text_of

MAX_PARKED_S = 0.5

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def write(setup: Setup, request_id: int, until: Callable[[], bool]) -> int:
    """Have an engine that writes without end, except while the request is parked. Return how many tokens it wrote."""
    engine, ids = setup.engine, setup.ids(" word" * 100)
    num_tokens = 0
    async with asyncio.timeout(TIMEOUT_S):
        while not until():
            if engine.parked.qsize() == engine.unparked.qsize():
                engine.step([request_id], ids, num_tokens=[len(ids)])
                num_tokens += len(ids)
            await setup.info()  # it has taken the step in
    return num_tokens


async def write_until_parked(setup: Setup, request_id: int) -> int:
    return await write(setup, request_id, lambda: not setup.engine.parked.empty())


async def test_call_whose_reader_stops_is_parked_while_others_go_on_and_goes_on_when_it_reads(setup: Setup) -> None:
    """E18."""
    slow, slow_id = await setup.begin()
    num_tokens = await write_until_parked(setup, slow_id)
    assert setup.engine.parked.get_nowait() == slow_id
    neighbour, neighbour_id = await setup.begin()
    setup.engine.step([slow_id, neighbour_id], [*setup.ids(" late"), *setup.ids(" quick")])
    setup.engine.end(neighbour_id)
    assert text_of(await neighbour.rest()) == " quick"
    reading = asyncio.create_task(slow.rest())
    async with asyncio.timeout(TIMEOUT_S):
        assert await setup.engine.unparked.get() == slow_id
    setup.engine.end(slow_id)
    events = await reading
    assert text_of(events) == " word" * num_tokens + " late"
    assert finished_of(events).usage.completion_tokens == num_tokens + 1
    assert (await setup.info()).load.num_parked == 0


async def test_what_waits_for_a_reader_that_stopped_is_bounded(setup: Setup) -> None:
    """E18: an engine that stops when told has written little, and only what was parked is counted as such."""
    call, request_id = await setup.begin()
    assert await write_until_parked(setup, request_id) < 100_000
    call.call.cancel()
    assert await setup.aborted() == request_id
    info = await setup.info()
    assert (info.load.num_parked, info.load.num_streams) == (0, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def impatient(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    """A detokenizer that waits half a second."""
    engine = ScriptedEngine()
    engine.says_hello.set()
    flags = ("--max-parked-s", str(MAX_PARKED_S))
    async with detokenizing(engine, tmp_path_factory.mktemp("impatient"), *flags) as setup:
        await setup.health_becomes(SERVING)
        yield setup


async def test_call_parked_too_long_ends_though_it_is_stuck_in_a_write(impatient: Setup) -> None:
    """E18: what its reader reads later is what was on its way, and why."""
    before = await scrape(impatient.status)
    call, request_id = await impatient.begin()
    await write(impatient, request_id, lambda: not impatient.engine.aborted.empty())
    assert await impatient.aborted() == request_id
    assert (await impatient.info()).load.num_streams == 0
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.rest()
    assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(ended.value) == ("SLOW_READER", 1.0)
    assert ended.value.details() == "the reader has held up its call for 0.5 s"
    serve = {"method": "kvern.v1.ReplicaService/Serve", "code": "RESOURCE_EXHAUSTED"}
    calls = before("kvern_rpc_requests_total", **serve) + 1
    after = await scrape_until(impatient.status, lambda now: now("kvern_rpc_requests_total", **serve) == calls)

    def more(name: str, **labels: str) -> float:
        return after(f"kvern_detokenizer_{name}", **labels) - before(f"kvern_detokenizer_{name}", **labels)

    assert more("sheds_total", reason="SLOW_READER") == more("sheds_total") == 1
    assert more("choices_total", reason="abort") == more("choices_total") == 1
    assert more("parks_total") >= 1


async def test_ended_answer_that_nobody_reads_gives_its_place_back(impatient: Setup) -> None:
    call, request_id = await impatient.begin()
    ids = impatient.ids(" word" * 100_000)
    end = engine_pb2.ChoiceEnd(id=request_id)
    impatient.engine.step([request_id], ids, num_tokens=[len(ids)], ended=[end])
    async with asyncio.timeout(TIMEOUT_S):
        while (await impatient.info()).load.num_streams:
            pass
    assert (await call.error())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_call_that_came_by_no_router_is_logged_as_ended_for_its_reader(impatient: Setup) -> None:
    request = inference_pb2.GenerateRequest(request_id="slow", token_ids=inference_pb2.TokenIds(ids=[5]))
    async with open_channel(f"unix:{impatient.log.parent}/detokenizer.sock") as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=TIMEOUT_S)
        async with asyncio.timeout(TIMEOUT_S):
            add = await impatient.engine.added.get()
        ids = impatient.ids(" word" * 100_000)
        impatient.engine.step([add.id], ids, num_tokens=[len(ids)], ended=[engine_pb2.ChoiceEnd(id=add.id)])
        line = await impatient.logged(event="request ended", request_id="slow")
        call.cancel()
    assert (line["door"], line["status"]) == ("direct", "RESOURCE_EXHAUSTED")
