"""Where the first replica is slow to answer, a second one is asked: on a router process that hedges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from kvern.v1 import inference_pb2, replica_pb2
from tests.services.scraping import Scrape, scrape

from . import scripted
from .answers import answer_of
from .conftest import starting
from .setup import NUM_REPLICAS, Call, Setup
from .test_relay import lost
from .test_router import failure

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEDGE_AFTER_S = 0.3
SESSION = "s"

Frames = AsyncIterator[replica_pb2.ServeResponse]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    async with starting(tmp_path_factory.mktemp("hedging"), "--hedge-after-s", str(HEDGE_AFTER_S)) as setup:
        yield setup


class FirstAsked:
    """Behaviours of the replica that a session's requests come to first, and of the others."""

    def __init__(self, first: scripted.Behaviour, others: scripted.Behaviour, *, is_late: bool = False) -> None:
        """is_late: the one asked first begins, and goes on when another one has been asked as well."""
        self._first = first
        self._others = others
        self._is_late = is_late
        self._others_asked = asyncio.Event()
        self.ended = asyncio.Event()
        """Set when the call of the one asked first has ended."""

    async def ask(self, setup: Setup) -> Call:
        """Have replicas behave so, and send a request.

        Which one is asked first the router says: where this process stands still, both calls may come at once.
        """
        request = inference_pb2.GenerateRequest(text="Hi", session_id=SESSION)
        home = (await setup.inference.Route(inference_pb2.RouteRequest(request=request))).address
        for replica in setup.replicas:
            replica.behaviour = self._behave_first if replica.address == home else self._behave_as_others
        return setup.generate(session_id=SESSION)

    async def _behave_first(self, request: inference_pb2.GenerateRequest) -> Frames:
        try:
            if self._is_late:
                yield scripted.started(request)
                await self._others_asked.wait()
            async for frame in self._first(request):
                yield frame
        finally:
            self.ended.set()

    async def _behave_as_others(self, request: inference_pb2.GenerateRequest) -> Frames:
        self._others_asked.set()
        async for frame in self._others(request):
            yield frame


async def answer(request: inference_pb2.GenerateRequest) -> Frames:
    yield scripted.started(request)
    told = scripted.delta("Hello")
    told.updates.add(new_token_ids=[1], text_bytes_total=5)
    yield told
    last = scripted.frame(inference_pb2.GenerateResponse(finished=inference_pb2.Finished()))
    last.updates.add(text_bytes_total=5, finished=True)
    yield last


async def break_off(request: inference_pb2.GenerateRequest) -> Frames:
    raise lost()
    yield scripted.started(request)


def when_alone(setup: Setup, behaviour: scripted.Behaviour) -> scripted.Behaviour:
    """Begin, and go on when the router has dropped the other replica that it had asked."""

    async def begin_and_wait(request: inference_pb2.GenerateRequest) -> Frames:
        yield scripted.started(request)
        await setup.statuses(lambda all_: sum(each.num_in_flight for each in all_) == 1)
        async for frame in behaviour(request):
            yield frame

    return begin_and_wait


@pytest.mark.parametrize("slow", [scripted.stall, scripted.stall_after_start])
async def test_slow_replica_is_dropped_for_the_one_that_answers(setup: Setup, slow: scripted.Behaviour) -> None:
    async def answer_until_the_other_is_dropped(request: inference_pb2.GenerateRequest) -> Frames:
        async for frame in answer(request):
            if frame.updates and frame.updates[0].finished:
                await asked.ended.wait()
            yield frame

    asked = FirstAsked(slow, answer_until_the_other_is_dropped)
    got = await answer_of(await asked.ask(setup))
    assert (got.events, got.text) == (["started", "delta", "finished"], {0: "Hello"})
    assert sorted(len(replica.received) for replica in setup.replicas) == [*[0] * (NUM_REPLICAS - 2), 1, 1]
    await setup.all_ready()


async def test_first_replica_that_answers_after_all_wins(setup: Setup) -> None:
    asked = FirstAsked(answer, scripted.stall_after_start, is_late=True)
    got = await answer_of(await asked.ask(setup))
    assert (got.events, got.text) == (["started", "delta", "finished"], {0: "Hello"})
    assert len(setup.received()) == 2
    await setup.all_ready()


async def test_each_second_replica_is_counted_once_as_won_or_lost(setup: Setup) -> None:
    def hedges(now: Scrape) -> list[float]:
        return [now("kvern_router_hedges_total", result=result) for result in ("won", "lost")]

    told = [hedges(await scrape(setup.status))]
    winning, losing = FirstAsked(scripted.stall, answer), FirstAsked(answer, scripted.stall_after_start, is_late=True)
    for asked in (winning, losing):
        await answer_of(await asked.ask(setup))
        await setup.all_ready()
        told.append(hedges(await scrape(setup.status)))
    setup.behave(scripted.stall)
    call = setup.generate()
    await setup.statuses(lambda all_: sum(each.num_in_flight for each in all_) == 2)
    call.cancel()
    await setup.all_ready()
    told.append(hedges(await scrape(setup.status)))
    steps = [(now[0] - then[0], now[1] - then[1]) for then, now in pairwise(told)]
    assert steps == [(1, 0), (0, 1), (0, 1)]


async def test_replica_that_answers_in_time_is_the_only_one_asked(tmp_path: Path) -> None:
    async with starting(tmp_path, "--hedge-after-s=60") as setup:
        setup.behave(answer)
        await answer_of(setup.generate())
        assert len(setup.received()) == 1


async def test_one_of_two_that_breaks_leaves_the_other(setup: Setup) -> None:
    for first, others in ((break_off, when_alone(setup, answer)), (when_alone(setup, answer), scripted.be_unavailable)):
        asked = FirstAsked(first, others, is_late=True)
        assert (await answer_of(await asked.ask(setup))).text == {0: "Hello"}
        await setup.all_ready()


async def test_two_that_break_without_a_token_are_poisoned(setup: Setup) -> None:
    asked = FirstAsked(break_off, when_alone(setup, break_off), is_late=True)
    error = await failure(await asked.ask(setup))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert len(setup.received()) == 2
    await setup.all_ready()


async def test_client_that_cancels_ends_both(setup: Setup) -> None:
    setup.behave(scripted.stall_after_start)
    call = setup.generate(timeout=None)
    await setup.arrived(2)
    call.cancel()
    await setup.all_ready()
    async with asyncio.timeout(30):
        for replica in setup.replicas:
            if replica.received:
                await replica.ended.wait()
