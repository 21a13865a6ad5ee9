"""Clients of bench/stream.py: many streams read by one process, each token counted and, at a pace, timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import grpc
from synthetic_engine import map_sent_at

from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.event_loop import EventLoop
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2
from kvern.v1.engine_pb2_grpc import EngineServiceStub
from kvern.v1.inference_pb2_grpc import InferenceServiceStub
from kvern.v1.replica_pb2_grpc import ReplicaServiceStub

if TYPE_CHECKING:
    from kvern.v1.engine_pb2_grpc import EngineServiceAsyncStub

Door = Literal["engine", "detokenizer", "router"]


@dataclass(frozen=True)
class Workload:
    """What one process of clients does. The engine begins when the streams of all processes are there."""

    door: Door
    """What is called: the way measured goes from the engine to there."""
    address: str
    sent_at: Path
    num_streams: int
    """Of this process."""
    batch_size: int
    """Streams of all processes."""
    num_tokens: int
    """Of each stream."""
    steps_per_s: int = 0
    """0: as many as are read. Else each token is timed."""

    def request(self) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(
            model="synthetic",
            token_ids=inference_pb2.TokenIds(ids=[self.batch_size, self.steps_per_s]),
            stopping=inference_pb2.Stopping(max_tokens=self.num_tokens, ignore_eos=True),
        )


@dataclass
class Received:
    """What came. Times are of time.monotonic()."""

    num_tokens: int = 0
    num_messages: int = 0
    """Those with tokens."""
    first_at: float = float("inf")
    last_at: float = 0.0
    cpu_s: float = 0.0
    """Of the process, while the streams ran."""
    added_s: list[float] = field(default_factory=list)
    """For each token, from the engine's sending it until it was read."""
    gaps_s: list[float] = field(default_factory=list)
    """Between messages of one stream."""

    def add(self, other: Received) -> None:
        self.num_tokens += other.num_tokens
        self.num_messages += other.num_messages
        self.first_at = min(self.first_at, other.first_at)
        self.last_at = max(self.last_at, other.last_at)
        self.cpu_s += other.cpu_s
        self.added_s += other.added_s
        self.gaps_s += other.gaps_s

    def count(self, num_tokens: int) -> None:
        """Take a message that was read just now."""
        self.last_at = time.monotonic()
        self.first_at = min(self.first_at, self.last_at)
        self.num_messages += 1
        self.num_tokens += num_tokens

    def count_and_time(self, num_tokens: int, sent_at: memoryview[float]) -> None:
        """Take a message whose tokens are the next of those sent at `sent_at`."""
        first, previous = self.num_tokens, self.last_at
        self.count(num_tokens)
        self.added_s += [self.last_at - sent for sent in sent_at[first : self.num_tokens]]
        if first:
            self.gaps_s.append(self.last_at - previous)


def run_clients(workload: Workload) -> Received:
    """Read a process's streams to their end. Raises AssertionError if a token is lost or comes twice."""
    received: Received = _run(_read_engine(workload) if workload.door == "engine" else _read_all(workload))
    return received


def run_slow_client(workload: Workload, interval_s: float, duration_s: float) -> None:
    """Read one message of one stream each `interval_s`. Hang up after `duration_s`."""
    _run(_read_slowly(workload, interval_s, duration_s))


def _run(main: Coroutine[Any, Any, Received | None]) -> Any:
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(main)


async def _read_all(workload: Workload) -> Received:
    streams = [Received() for _ in range(workload.num_streams)]
    async with open_channel(workload.address) as channel, asyncio.TaskGroup() as tasks:
        start_s = time.process_time()
        for stream in streams:
            tasks.create_task(_read_stream(workload, channel, stream))
    received = Received(cpu_s=time.process_time() - start_s)
    for stream in streams:
        received.add(stream)
    return received


async def _read_stream(workload: Workload, channel: grpc.aio.Channel, received: Received) -> None:
    """Read a stream to its end. Each token's text is one word with a space before it, so spaces count tokens."""
    sent_at = map_sent_at(workload.sent_at) if workload.steps_per_s else None
    async for event in _events(workload, channel):
        if event.HasField("finished"):
            assert event.finished.usage.completion_tokens == received.num_tokens == workload.num_tokens
        elif event.HasField("delta"):
            num_tokens = event.delta.text.count(" ")
            if sent_at is None:
                received.count(num_tokens)
            else:
                received.count_and_time(num_tokens, sent_at)
    assert received.num_tokens == workload.num_tokens


async def _events(workload: Workload, channel: grpc.aio.Channel) -> AsyncIterator[inference_pb2.GenerateResponse]:
    request = workload.request()
    if workload.door == "router":
        async for event in InferenceServiceStub(channel).Generate(request, wait_for_ready=True):
            yield event
    else:
        serve = replica_pb2.ServeRequest(request=request)
        async for response in ReplicaServiceStub(channel).Serve(serve, wait_for_ready=True):
            yield inference_pb2.GenerateResponse.FromString(response.client_frame)


async def _read_slowly(workload: Workload, interval_s: float, duration_s: float) -> None:
    async with open_channel(workload.address) as channel:
        call = InferenceServiceStub(channel).Generate(workload.request(), wait_for_ready=True)
        for _ in range(round(duration_s / interval_s)):
            await call.read()
            await asyncio.sleep(interval_s)
        call.cancel()


async def _read_engine(workload: Workload) -> Received:
    """Read the engine's own stream and do nothing with it: how fast it is with nobody in between."""
    received = Received()
    async with open_channel(workload.address) as channel:
        start_s = time.process_time()
        stub: EngineServiceAsyncStub = EngineServiceStub(channel)
        stream: Any = stub.Connect(wait_for_ready=True)  # the stubs know it as an iterator only
        await stream.read()
        for number in range(workload.num_streams):
            add = engine_pb2.AddRequest(
                id=number,
                prompt_token_ids=[workload.batch_size, 0],
                stopping=inference_pb2.Stopping(max_tokens=workload.num_tokens),
            )
            await stream.write(engine_pb2.ConnectRequest(add=add))
        while received.num_tokens < workload.num_streams * workload.num_tokens:
            response = await stream.read()
            if response.step.ids:
                received.count(len(response.step.ids))
        stream.cancel()
        received.cpu_s = time.process_time() - start_s
    return received
