"""An engine that says what a test tells it to: a real gRPC server, no model behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvern.v1 import engine_pb2, engine_pb2_grpc, inference_pb2, replica_pb2

MAX_MODEL_LEN = 64
VOCAB_SIZE = 49152
EOS = 2

INFO = replica_pb2.EngineInfo(
    epoch=7,
    model="tiny",
    contract="c",
    block_size=16,
    max_model_len=MAX_MODEL_LEN,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=[EOS],
)


class ScriptedEngine(engine_pb2_grpc.EngineServiceServicer):
    """Keeps what it is told, sends what `step` is given. One stream at a time."""

    def __init__(self) -> None:
        self.added: asyncio.Queue[engine_pb2.AddRequest] = asyncio.Queue()
        self.aborted: asyncio.Queue[int] = asyncio.Queue()
        self.parked: asyncio.Queue[int] = asyncio.Queue()
        self.unparked: asyncio.Queue[int] = asyncio.Queue()
        self.says_hello = asyncio.Event()
        self.connected = asyncio.Event()
        self._outputs: asyncio.Queue[engine_pb2.StepOutput | None] = asyncio.Queue()

    def step(self, ids: Sequence[int] = (), token_ids: Sequence[int] = (), **fields: Any) -> None:
        """Send one StepOutput."""
        self._outputs.put_nowait(engine_pb2.StepOutput(ids=ids, token_ids=token_ids, **fields))

    def end(
        self, request_id: int, reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_LENGTH, **fields: Any
    ) -> None:
        """End a request without further tokens."""
        self.step(ended=[engine_pb2.ChoiceEnd(id=request_id, reason=reason, **fields)])

    def hang_up(self) -> None:
        """End the stream."""
        self._outputs.put_nowait(None)

    async def Connect(
        self, request_iterator: AsyncIterator[engine_pb2.ConnectRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.ConnectResponse]:
        reader = asyncio.create_task(self._read(request_iterator))
        self.connected.set()
        try:
            await self.says_hello.wait()
            yield engine_pb2.ConnectResponse(hello=engine_pb2.Hello(info=INFO))
            while (step := await self._outputs.get()) is not None:
                yield engine_pb2.ConnectResponse(step=step)
        finally:
            reader.cancel()

    async def _read(self, commands: AsyncIterator[engine_pb2.ConnectRequest]) -> None:
        async for command in commands:
            if command.HasField("add"):
                self.added.put_nowait(command.add)
            elif command.HasField("abort"):
                self.aborted.put_nowait(command.abort.id)
            elif command.HasField("park"):
                self.parked.put_nowait(command.park.id)
            else:
                self.unparked.put_nowait(command.unpark.id)


@asynccontextmanager
async def serving(engine: ScriptedEngine, address: str) -> AsyncIterator[None]:
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)
