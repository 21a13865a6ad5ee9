"""What gRPC itself takes for a message of a stream, in CPU time of each end: what no service in Python can go below.

    python bench/grpc_floor.py [--streams 64] [--json]

A server that does nothing else writes a message of 60 bytes to each of its streams, all in a burst, every 70 ms, as a
step of a small model would have it, and a client reads them. Both run on the event loop of Kvern's services.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import click
import grpc

from kvern.services.runtime.event_loop import EventLoop

INTERVAL_S = 0.07
MESSAGE = bytes(60)
METHOD = "/bench.Floor/Stream"


class _Streams(grpc.GenericRpcHandler):
    """Streams whose messages are put into `queues`. None ends one."""

    def __init__(self) -> None:
        self.queues: list[asyncio.Queue[bytes | None]] = []
        self.begun = asyncio.Semaphore(0)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_stream_rpc_method_handler(self._stream)

    async def _stream(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.queues.append(queue)
        self.begun.release()
        while (message := await queue.get()) is not None:
            yield message


async def _write(address: str, num_streams: int, num_bursts: int, results: Connection) -> float:
    server, streams = grpc.aio.server(), _Streams()
    server.add_generic_rpc_handlers((streams,))
    server.add_insecure_port(address)
    await server.start()
    results.send("started")
    for _ in range(num_streams):
        await streams.begun.acquire()
    start_s = time.process_time()
    for _ in range(num_bursts):
        for queue in streams.queues:
            queue.put_nowait(MESSAGE)
        await asyncio.sleep(INTERVAL_S)
    taken_s = time.process_time() - start_s
    for queue in streams.queues:
        queue.put_nowait(None)
    # A connection closed now could break what the client still writes, and gRPC then drops what it has not read yet.
    await asyncio.to_thread(results.recv)  # the client has read all
    await server.stop(grace=None)
    return taken_s


async def _read(address: str, num_streams: int, num_bursts: int, results: Connection) -> float:
    async with grpc.aio.insecure_channel(address) as channel:
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)

        async def read() -> None:
            async for _ in method(b""):
                pass

        start_s = time.process_time()
        await asyncio.gather(*(read() for _ in range(num_streams)))
        return time.process_time() - start_s


def _run(end: str, address: str, num_streams: int, num_bursts: int, results: Connection) -> None:
    work: Coroutine[Any, Any, float] = {"server": _write, "client": _read}[end](
        address, num_streams, num_bursts, results
    )
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        results.send(runner.run(work) / num_streams / num_bursts * 1e6)


def measure(num_streams: int, num_bursts: int) -> dict[str, float]:
    """Return the microseconds of each end for a message."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        connections = {}
        for end in ("server", "client"):
            connections[end], theirs = context.Pipe()
            arguments = end, f"unix:{folder}/floor.sock", num_streams, num_bursts, theirs
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            stack.callback(_end, process)
            theirs.close()
            if end == "server":
                connections[end].recv()  # it has started
        costs: dict[str, float] = {"client": connections["client"].recv()}
        connections["server"].send("read")
        costs["server"] = connections["server"].recv()
    return costs


def _end(process: SpawnProcess) -> None:
    """End a process that has told what it found, or whose other end has died."""
    process.kill()
    process.join()


@click.command()
@click.option("--streams", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--bursts", type=click.IntRange(min=1), default=150, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of two lines.")
def main(streams: int, bursts: int, as_json: bool) -> None:
    """Measure both ends."""
    costs = measure(streams, bursts)
    if as_json:
        print(json.dumps({f"{end}_us_per_message": cost for end, cost in costs.items()}))
        return
    for end, cost in costs.items():
        print(f"{end}: {cost:.1f} us a message")


if __name__ == "__main__":
    main()
