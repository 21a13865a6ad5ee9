"""What the services' event loop does with gRPC's wake-ups."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.event_loop import EventLoop

NUM_CALLS = 50


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A health service, run by threads: it answers while the event loop stands still."""
    server = grpc.server(ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    address = f"unix:{tmp_path}/health.sock"
    server.add_insecure_port(address)
    server.start()
    yield address
    server.stop(0).wait()


class _Watching(uvloop.Loop):
    """Keeps which socket wakes it up for gRPC, and how much of that each wake-up leaves unread."""

    wake_ups: socket.socket

    def __init__(self) -> None:
        super().__init__()
        self.left: list[int] = []

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        def watched() -> None:
            callback(*args)
            self.left.append(self.num_unread)

        self.wake_ups = fd
        super().add_reader(fd, watched)

    @property
    def num_unread(self) -> int:
        return int(struct.unpack("i", fcntl.ioctl(self.wake_ups, termios.FIONREAD, bytes(4)))[0])


class WatchedLoop(EventLoop, _Watching):
    """The services' event loop, watched from below."""


def test_wake_ups_of_a_burst_are_read_at_once(address: str) -> None:
    async def burst(loop: WatchedLoop) -> None:
        async with open_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            await check(health_pb2.HealthCheckRequest())
            calls = [asyncio.ensure_future(check(health_pb2.HealthCheckRequest())) for _ in range(NUM_CALLS)]
            await asyncio.sleep(0)  # they are sent
            deadline = time.monotonic() + 20
            while loop.num_unread < NUM_CALLS:
                assert time.monotonic() < deadline
                time.sleep(0.01)  # noqa: ASYNC251 (the loop stands still until all are answered)
            loop.left.clear()
            await asyncio.gather(*calls)

    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        loop = runner.get_loop()
        runner.run(burst(loop))
        assert loop.left == [0]
