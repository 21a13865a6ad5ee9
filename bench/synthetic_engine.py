"""An engine without a model, for measuring what is around it: each running request gets one token a step.

    python bench/synthetic_engine.py --listen unix:/tmp/engine.sock --token-ids 260,282 --sent-at FILE

A request's prompt is two token ids that say how to run it: how many requests make a batch, and how many steps to run a
second, 0 for as many as the stream takes. A batch's steps begin when all of its requests are there, so a token's number
in its request is that of its step. The time before each step is sent is written to FILE: doubles by the step's number,
of time.monotonic(), which all processes share.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import click
import grpc

from kvern.services.runtime.channel import SERVER_OPTIONS
from kvern.services.runtime.event_loop import EventLoop
from kvern.v1 import engine_pb2, engine_pb2_grpc, inference_pb2, replica_pb2

MAX_STEPS = 1_000_000
"""Of one batch."""

_INFO = replica_pb2.EngineInfo(
    epoch=1,
    model="synthetic",
    contract="synthetic",
    block_size=16,
    num_blocks=2**16,
    max_model_len=2**20,
    max_num_seqs=1024,
    vocab_size=49152,
    eos_token_ids=[0],
    dtype="float32",
    device="cpu",
)
"""As of SmolLM2, but for the lengths."""


def map_sent_at(path: Path) -> memoryview[float]:
    """Map the file of send times, writable, one double a step. It is made where there is none."""
    with path.open("ab+") as file:
        file.truncate(MAX_STEPS * 8)
        return memoryview(mmap.mmap(file.fileno(), MAX_STEPS * 8)).cast("d")


class Requests:
    """The requests of one stream. Those that come while a batch runs wait for the next."""

    def __init__(self) -> None:
        self._batch_size = 1
        self._steps_per_s = 0
        self._waiting: dict[int, int] = {}
        """Tokens to come, by request."""
        self._running: dict[int, int] = {}
        self._parked: set[int] = set()
        self._changed = asyncio.Event()

    async def read(self, commands: AsyncIterator[engine_pb2.ConnectRequest]) -> None:
        async for command in commands:
            self._take(command)
            self._changed.set()

    async def next_batch(self) -> list[int]:
        """Wait until a batch is complete and return its requests."""
        while len(self._waiting) < self._batch_size:
            await self._wait_for_change()
        self._running, self._waiting = self._waiting, {}
        return list(self._running)

    async def steps(self) -> AsyncIterator[tuple[list[int], list[int]]]:
        """Yield for each step of the batch, when it is due, who gets a token, and for whom it is the last."""
        interval_s = 1 / self._steps_per_s if self._steps_per_s else 0.0
        due_at = time.monotonic()
        while self._running:
            ids = [request_id for request_id in self._running if request_id not in self._parked]
            if not ids:
                await self._wait_for_change()
                continue
            yield ids, self._advance(ids)
            due_at = max(due_at + interval_s, time.monotonic())  # what was lost is not made up for
            if interval_s:
                await asyncio.sleep(due_at - time.monotonic())

    def _take(self, command: engine_pb2.ConnectRequest) -> None:
        if command.HasField("add"):
            self._batch_size, self._steps_per_s = command.add.prompt_token_ids
            self._waiting[command.add.id] = command.add.stopping.max_tokens
        elif command.HasField("abort"):
            self._waiting.pop(command.abort.id, None)
            self._running.pop(command.abort.id, None)
        elif command.HasField("park"):
            self._parked.add(command.park.id)
        elif command.HasField("unpark"):
            self._parked.discard(command.unpark.id)

    def _advance(self, ids: Sequence[int]) -> list[int]:
        ended = []
        for request_id in ids:
            self._running[request_id] -= 1
            if self._running[request_id] == 0:
                del self._running[request_id]
                ended.append(request_id)
        return ended

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class SyntheticEngine(engine_pb2_grpc.EngineServiceServicer):
    """Writes one StepOutput a step, the next when the stream has taken it: the reader's window is the bound."""

    def __init__(self, token_ids: Sequence[int], sent_at: memoryview[float]) -> None:
        self._num_kinds = len(token_ids)
        # Any step's column of tokens is a slice of it.
        self._token_ids = list(itertools.islice(itertools.cycle(token_ids), self._num_kinds + _INFO.max_num_seqs))
        self._sent_at = sent_at

    async def Connect(  # noqa: N802 (as in the proto)
        self, request_iterator: AsyncIterator[engine_pb2.ConnectRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.ConnectResponse]:
        requests = Requests()
        reader = asyncio.create_task(requests.read(request_iterator))
        try:
            yield engine_pb2.ConnectResponse(hello=engine_pb2.Hello(info=_INFO))
            while True:
                scheduled = [engine_pb2.FirstScheduled(id=request_id) for request_id in await requests.next_batch()]
                yield engine_pb2.ConnectResponse(step=engine_pb2.StepOutput(scheduled=scheduled))
                step = 0
                async for ids, ended in requests.steps():
                    output = self._output(step, ids, ended)
                    self._sent_at[step] = time.monotonic()
                    yield output
                    step += 1
        finally:
            reader.cancel()

    WatchBlocks = engine_pb2_grpc.EngineServiceServicer.WatchBlocks  # UNIMPLEMENTED: it caches nothing

    def _output(self, step: int, ids: Sequence[int], ended: Sequence[int]) -> engine_pb2.ConnectResponse:
        first = step % self._num_kinds
        output = engine_pb2.StepOutput(
            ids=ids,
            token_ids=self._token_ids[first : first + len(ids)],
            load=replica_pb2.ReplicaLoad(num_running=len(ids)),
        )
        for request_id in ended:
            output.ended.add(id=request_id, reason=inference_pb2.FINISH_REASON_LENGTH)
        return engine_pb2.ConnectResponse(step=output)


async def serve(listen: str, token_ids: Sequence[int], sent_at: memoryview[float]) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    engine_pb2_grpc.add_EngineServiceServicer_to_server(SyntheticEngine(token_ids, sent_at), server)
    server.add_insecure_port(listen)
    await server.start()
    await server.wait_for_termination()


@click.command()
@click.option("--listen", required=True)
@click.option("--token-ids", required=True, help="What it writes, over and over, joined with commas.")
@click.option("--sent-at", type=click.Path(path_type=Path), required=True)
def main(listen: str, token_ids: str, sent_at: Path) -> None:
    """Serve until killed."""
    written = [int(token_id) for token_id in token_ids.split(",")]
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(serve(listen, written, map_sent_at(sent_at)))


if __name__ == "__main__":
    main()
