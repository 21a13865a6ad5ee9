"""A detokenizer process in front of an engine that does what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2, replica_pb2_grpc
from tests.services.processes import running
from tests.services.scraping import status_address

from .scripted_engine import ScriptedEngine, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MAX_STREAMS = 4
TIMEOUT_S = 60.0
"""No wait that succeeds takes this long, however slow the machine."""


class Call:
    """One Serve call, its frames unwrapped."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[replica_pb2.ServeRequest, replica_pb2.ServeResponse]) -> None:
        self.call = call
        self._frames = aiter(call)
        self.updates: list[replica_pb2.ChoiceUpdate] = []
        self.cached_tokens: list[int] = []
        """What the router was told, by message that says it."""
        self.add = engine_pb2.AddRequest()
        """The request as it came to the engine."""

    async def next(self) -> inference_pb2.GenerateResponse:
        return self._take(await anext(self._frames))

    async def rest(self) -> list[inference_pb2.GenerateResponse]:
        """Read to the end."""
        return [self._take(frame) async for frame in self._frames]

    def _take(self, frame: replica_pb2.ServeResponse) -> inference_pb2.GenerateResponse:
        self.updates.extend(frame.updates)
        if frame.HasField("cached_tokens"):
            self.cached_tokens.append(frame.cached_tokens)
        return inference_pb2.GenerateResponse.FromString(frame.client_frame)

    async def error(self) -> tuple[grpc.StatusCode, str]:
        """Read to the end, which is an error."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.rest()
        return raised.value.code(), raised.value.details() or ""


@dataclass
class Setup:
    """A detokenizer, its engine, and stubs to it."""

    engine: ScriptedEngine
    process: asyncio.subprocess.Process
    replica: replica_pb2_grpc.ReplicaServiceAsyncStub
    health: health_pb2_grpc.HealthStub
    tokenizer: Tokenizer
    status: str
    """Where it tells its metrics."""
    log: Path

    async def logged(self, **fields: Any) -> dict[str, Any]:
        """Wait for a line of its log that says this, and return it."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                whole_lines, _, _ = self.log.read_text().rpartition("\n")
                for line in map(json.loads, whole_lines.splitlines()):
                    if fields.items() <= line.items():
                        return dict(line)
                await asyncio.sleep(0.01)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def serve(self, prompt: Sequence[int] = (5, 6, 7), timeout_s: float = TIMEOUT_S, **fields: Any) -> Call:
        fields = {"sampling": inference_pb2.Sampling(seed=9)} | fields
        request = inference_pb2.GenerateRequest(
            request_id="r", model="tiny", token_ids=inference_pb2.TokenIds(ids=prompt), **fields
        )
        return Call(self.replica.Serve(replica_pb2.ServeRequest(request=request), timeout=timeout_s))

    async def begin(self, **fields: Any) -> tuple[Call, int]:
        """Serve a request up to Started; return the call and the request's id at the engine."""
        call = self.serve(**fields)
        assert (await call.next()).HasField("started")
        async with asyncio.timeout(TIMEOUT_S):
            call.add = await self.engine.added.get()
        return call, call.add.id

    async def aborted(self) -> int:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.engine.aborted.get()

    async def info(self) -> replica_pb2.GetReplicaInfoResponse:
        return await self.replica.GetReplicaInfo(replica_pb2.GetReplicaInfoRequest(), timeout=TIMEOUT_S)

    async def load_becomes(self, wanted: replica_pb2.ReplicaLoad) -> None:
        """Wait until the service knows the load that the engine told of."""
        async with asyncio.timeout(TIMEOUT_S):
            while (await self.info()).load.queued_prefill_tokens != wanted.queued_prefill_tokens:
                pass

    async def health_becomes(self, wanted: int) -> None:
        call = self.health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
        async for response in call:
            if response.status == wanted:
                break
        call.cancel()


def details_of(error: grpc.aio.AioRpcError) -> tuple[str, float | None]:
    """Return the reason in a status and the delay to retry after, in seconds."""
    trailing = dict(error.trailing_metadata() or ())
    reason, delay_s = "", None
    for detail in status_pb2.Status.FromString(trailing["grpc-status-details-bin"]).details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        if detail.Unpack(retry):
            delay_s = retry.retry_delay.ToTimedelta().total_seconds()
    return reason, delay_s


def text_of(events: Sequence[inference_pb2.GenerateResponse]) -> str:
    return "".join(event.delta.text for event in events if event.HasField("delta"))


def finished_of(events: Sequence[inference_pb2.GenerateResponse]) -> inference_pb2.Finished:
    [finished] = [event.finished for event in events if event.HasField("finished")]
    assert events[-1].HasField("finished")
    return finished


@asynccontextmanager
async def detokenizing(
    engine: ScriptedEngine, folder: Path, *flags: str, drain_delay_s: float = 0
) -> AsyncIterator[Setup]:
    address, engine_address = f"unix:{folder}/detokenizer.sock", f"unix:{folder}/engine.sock"
    status = status_address()
    flags = ("--listen", address, "--engine", engine_address, "--status-listen", status, *flags)
    async with (
        serving(engine, engine_address),
        running("detokenizer", *flags, log=folder / "log", drain_delay_s=drain_delay_s) as process,
        open_channel(address) as channel,
    ):
        yield Setup(
            engine,
            process,
            replica_pb2_grpc.ReplicaServiceStub(channel),
            health_pb2_grpc.HealthStub(channel),
            load_tokenizer(find_model("smollm2")),
            status,
            folder / "log",
        )
