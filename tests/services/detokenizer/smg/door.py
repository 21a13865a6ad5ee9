"""A detokenizer with SMG's door open, and what tests do there as SMG would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from kvern.services.runtime.channel import open_channel
from kvern.v1 import engine_pb2
from tests.services.detokenizer.scripted_engine import ScriptedEngine
from tests.services.detokenizer.setup import TIMEOUT_S, Setup, detokenizing
from tests.up_process import free_port

SALT = "gate"


class SmgCall:
    """One Generate call."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._responses = aiter(call)
        self.add = engine_pb2.AddRequest()
        """The request as it came to the engine."""

    async def chunk(self) -> Any:
        response = await anext(self._responses)
        assert response.HasField("chunk")
        return response.chunk

    async def rest(self) -> list[Any]:
        """Read to the end, and unwrap."""
        return [getattr(each, each.WhichOneof("response")) async for each in self._responses]

    async def error(self) -> tuple[grpc.StatusCode, str]:
        """Read to the end, which is an error."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.rest()
        return raised.value.code(), raised.value.details() or ""


@dataclass
class Door:
    """A detokenizer and its scripted engine, with a stub to SMG's door."""

    setup: Setup
    address: str
    stub: Any

    @property
    def engine(self) -> ScriptedEngine:
        return self.setup.engine

    def generate(
        self, ids: Sequence[int] = (5, 6, 7), *, request_id: str = "r", stream: bool = True, **fields: Any
    ) -> SmgCall:
        """fields: of GenerateRequest where it has them, else of SamplingParams."""
        own = {name: fields.pop(name) for name in list(fields) if name in _OWN_FIELDS}
        if "text" not in own:
            own["tokenized"] = vllm_engine_pb2.TokenizedInput(input_ids=ids)
        params = vllm_engine_pb2.SamplingParams(**fields)
        request = vllm_engine_pb2.GenerateRequest(request_id=request_id, stream=stream, sampling_params=params, **own)
        return SmgCall(self.stub.Generate(request, timeout=TIMEOUT_S))

    async def begin(self, **fields: Any) -> SmgCall:
        """Call up to where the engine has the request."""
        call = self.generate(**fields)
        async with asyncio.timeout(TIMEOUT_S):
            call.add = await self.engine.added.get()
        return call

    async def abort(self, *request_ids: str) -> None:
        await self.stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=request_ids), timeout=TIMEOUT_S)

    async def health(self) -> tuple[bool, str]:
        answer = await self.stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        return answer.healthy, answer.message


_OWN_FIELDS = {field.name for field in vllm_engine_pb2.GenerateRequest.DESCRIPTOR.fields}


@asynccontextmanager
async def open_door(folder: Path, *flags: str) -> AsyncIterator[Door]:
    address = f"127.0.0.1:{free_port()}"
    flags = ("--smg-listen", address, "--smg-salt", SALT, *flags)
    async with detokenizing(ScriptedEngine(), folder, *flags) as setup, open_channel(address) as channel:
        yield Door(setup, address, vllm_engine_pb2_grpc.VllmEngineStub(channel))
