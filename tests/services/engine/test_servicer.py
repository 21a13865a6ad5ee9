"""Commands that come while a request's grammar is compiled, which lasts as long as the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import grpc

from kvern.engine.core import Abort, Add, Command
from kvern.engine.grammar import Grammar
from kvern.services.engine.engine_thread import EngineThread
from kvern.services.engine.grammars import Grammars
from kvern.services.engine.request_stats import RequestStats
from kvern.services.engine.servicer import EngineServicer, ServedEngine
from kvern.services.engine.stats import EngineStats
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2


class HeldGrammars:
    """Compiles when it is let go."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)
        self.may_end = asyncio.Event()

    async def compile(self, constraint: inference_pb2.Constraint) -> Grammar:
        self.begun.release()
        await self.may_end.wait()
        return cast(Grammar, SimpleNamespace(start=lambda: SimpleNamespace(advance=None)))


class RecordingThread:
    """An engine that does nothing with what it is told."""

    def __init__(self) -> None:
        self.commands: asyncio.Queue[Command] = asyncio.Queue()

    def send(self, command: Command) -> None:
        self.commands.put_nowait(command)

    def go_on(self) -> None:
        """It has not been paused."""


async def each(commands: asyncio.Queue[engine_pb2.ConnectRequest]) -> AsyncIterator[engine_pb2.ConnectRequest]:
    while True:
        yield await commands.get()


def constrained(number: int) -> engine_pb2.ConnectRequest:
    add = engine_pb2.AddRequest(
        id=number,
        prompt_token_ids=[5],
        stopping=inference_pb2.Stopping(max_tokens=4),
        constraint=inference_pb2.Constraint(regex="a+"),
    )
    return engine_pb2.ConnectRequest(add=add)


async def test_request_aborted_while_its_grammar_is_compiled_never_runs() -> None:
    thread, grammars = RecordingThread(), HeldGrammars()
    servicer = EngineServicer(0, RequestStats(EngineStats()))
    info = replica_pb2.EngineInfo(vocab_size=50)
    servicer.start_serving(ServedEngine(cast(EngineThread, thread), info, cast(Grammars, grammars)))
    commands: asyncio.Queue[engine_pb2.ConnectRequest] = asyncio.Queue()
    context = cast("grpc.aio.ServicerContext[Any, Any]", None)
    responses = cast(AsyncGenerator[engine_pb2.ConnectResponse], servicer.Connect(each(commands), context))
    async with aclosing(responses), asyncio.timeout(30):
        assert (await anext(responses)).HasField("hello")
        commands.put_nowait(constrained(1))
        await grammars.begun.acquire()
        commands.put_nowait(engine_pb2.ConnectRequest(abort=engine_pb2.AbortRequest(id=1)))
        commands.put_nowait(constrained(2))
        await grammars.begun.acquire()
        grammars.may_end.set()
        aborted, added = await thread.commands.get(), await thread.commands.get()
        assert isinstance(aborted, Abort)
        assert isinstance(added, Add)
        assert added.request.request_id != aborted.request_id
    assert await thread.commands.get() == Abort(added.request.request_id)
    assert thread.commands.empty()
