"""Streams that come from another replica, and streams that are sent to one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from kvern.v1 import inference_pb2, replica_pb2

from .scripted_engine import ScriptedEngine
from .setup import MAX_STREAMS, SERVING, TIMEOUT_S, Call, Setup, details_of, detokenizing, text_of

pytestmark = pytest.mark.asyncio(loop_scope="package")


def serve(setup: Setup, *, moved: bool = False, age_s: float = 0.0) -> Call:
    request = inference_pb2.GenerateRequest(
        request_id="r", model="tiny", token_ids=inference_pb2.TokenIds(ids=[5, 6]), sampling={"seed": 9}
    )
    return Call(setup.replica.Serve(replica_pb2.ServeRequest(request=request, moved=moved, age_s=age_s)))


async def test_moved_request_waits_where_all_streams_are_taken_and_keeps_its_age(setup: Setup) -> None:
    calls = [await setup.begin() for _ in range(MAX_STREAMS)]
    code, _ = await serve(setup).error()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    moved = serve(setup, moved=True, age_s=12.5)
    assert (await moved.next()).HasField("started")
    async with asyncio.timeout(TIMEOUT_S):
        add = await setup.engine.added.get()
    assert add.age_s == 12.5
    for call in (moved, *(call for call, _ in calls)):
        call.call.cancel()
    for _ in range(MAX_STREAMS + 1):
        await setup.aborted()


async def test_stream_that_still_runs_at_the_end_of_a_drain_is_sent_elsewhere(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.says_hello.set()
    async with detokenizing(engine, tmp_path, "--drain-timeout-s", "2") as setup:
        await setup.health_becomes(SERVING)
        call, request_id = await setup.begin()
        engine.step([request_id], setup.ids(" one"))
        assert text_of([await call.next()]) == " one"
        setup.process.terminate()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.rest()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(ended.value) == ("DRAINING", None)
        assert await setup.aborted() == request_id
        assert await setup.process.wait() == 0


async def test_parked_stream_is_sent_elsewhere_as_soon_as_a_drain_begins(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.says_hello.set()
    async with detokenizing(engine, tmp_path) as setup:
        await setup.health_becomes(SERVING)
        (slow, slow_id), (other, other_id) = await setup.begin(), await setup.begin()
        ids = setup.ids(" word" * 100)
        async with asyncio.timeout(TIMEOUT_S):
            while engine.parked.empty():
                engine.step([slow_id], ids, num_tokens=[len(ids)])
                await setup.info()
        setup.process.terminate()
        assert await setup.aborted() == slow_id
        engine.step([other_id], setup.ids(" late"))
        engine.end(other_id)
        assert text_of(await other.rest()) == " late"
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await slow.rest()
        assert details_of(ended.value) == ("DRAINING", None)
        assert await setup.process.wait() == 0
