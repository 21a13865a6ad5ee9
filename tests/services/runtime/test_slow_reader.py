"""Calls whose readers do not read, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from kvern.services.runtime import interceptors
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.interceptors import STATUS_DETAILS_KEY, ErrorInterceptor
from kvern.services.runtime.slow_reader import SLOW_READER, ReaderWatch
from kvern.v1 import replica_pb2, replica_pb2_grpc

TIMEOUT_S = 20.0
FRAME = replica_pb2.ServeResponse(client_frame=b"x" * 100_000)


class Writer(replica_pb2_grpc.ReplicaServiceServicer):
    """Writes without end, each message under the watch."""

    def __init__(self) -> None:
        self.limit_s = 0.1
        self.num_messages = 10**9
        self.num_written = 0
        self.ended = asyncio.Event()
        self.is_gone = asyncio.Event()
        """Set when nothing of a call is left."""

    async def Serve(
        self, request: replica_pb2.ServeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[replica_pb2.ServeResponse]:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self.is_gone.set())
        try:
            with ReaderWatch(self.limit_s) as reader:
                for _ in range(self.num_messages):
                    reader.hold()
                    yield FRAME
                    reader.release()
                    self.num_written += 1
        finally:
            self.ended.set()


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest_asyncio.fixture
async def stub(writer: Writer, tmp_path: Path) -> AsyncIterator[replica_pb2_grpc.ReplicaServiceAsyncStub]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(writer, server)
    server.add_insecure_port(f"unix:{tmp_path}/s.sock")
    await server.start()
    try:
        async with open_channel(f"unix:{tmp_path}/s.sock") as channel:
            yield replica_pb2_grpc.ReplicaServiceStub(channel)
    finally:
        await server.stop(0)


async def failure(call: grpc.aio.UnaryStreamCall[Any, Any]) -> tuple[int, grpc.aio.AioRpcError]:
    """Read to the end; return how many messages came, and the error."""
    count = 0
    try:
        while await call.read() is not grpc.aio.EOF:
            count += 1
    except grpc.aio.AioRpcError as error:
        return count, error
    raise AssertionError("the call ended well")


async def test_reader_that_stops_is_cut_off_while_its_handler_is_stuck_in_a_write(
    stub: replica_pb2_grpc.ReplicaServiceAsyncStub, writer: Writer
) -> None:
    """E18: what it reads afterwards is what was on its way, and why its call ended."""
    call = stub.Serve(replica_pb2.ServeRequest(), timeout=TIMEOUT_S)
    await call.read()
    async with asyncio.timeout(TIMEOUT_S):
        await writer.ended.wait()
    count, error = await failure(call)
    assert count <= writer.num_written + 1
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "the reader has held up its call for 0.1 s"
    status = status_pb2.Status.FromString(dict(error.trailing_metadata() or ())[STATUS_DETAILS_KEY])
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, retry.retry_delay.seconds) == (SLOW_READER, 1)


async def test_call_whose_reader_does_not_come_back_leaves_nothing_that_waits_for_it(
    stub: replica_pb2_grpc.ReplicaServiceAsyncStub, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptors, "MAX_VERDICT_S", 0.1)
    call = stub.Serve(replica_pb2.ServeRequest(), timeout=3 * TIMEOUT_S)
    await call.read()
    async with asyncio.timeout(TIMEOUT_S):
        await writer.is_gone.wait()
    call.cancel()


async def test_reader_that_reads_is_never_cut_off(
    stub: replica_pb2_grpc.ReplicaServiceAsyncStub, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds up many writes, none of them for long. Time goes on when it has let go of one, and else never."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    writer.limit_s, writer.num_messages = 1.0, 60
    call = stub.Serve(replica_pb2.ServeRequest(), timeout=TIMEOUT_S)
    count = num_let_go = 0
    while await call.read() is not grpc.aio.EOF:
        count += 1
        if writer.num_written > num_let_go:
            num_let_go = writer.num_written
            now += 0.4
    assert (count, await call.code()) == (60, grpc.StatusCode.OK)


async def test_watch_left_or_released_ends_nothing() -> None:
    with ReaderWatch(0.01) as reader:
        reader.hold()
        reader.release()
        await asyncio.sleep(0.05)
        reader.hold()
    await asyncio.sleep(0.05)
