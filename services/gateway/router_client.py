"""The gateway's calls to a router, each in the name of the HTTP client that asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.requests import Request

from kvern.services.gateway.errors import ApiError, from_rpc
from kvern.services.runtime.channel import MAX_AUTHORIZATION_BYTES, streaming
from kvern.services.runtime.tracing import current_span
from kvern.v1 import inference_pb2 as pb
from kvern.v1 import inference_pb2_grpc

UNARY_TIMEOUT_S = 30.0
"""A long text takes seconds to tokenize."""

HEALTH_TIMEOUT_S = 1.0

RECONNECT_TIMEOUT_S = 5.0
"""How long a request waits for a router that cannot be reached. One that was killed is back after a moment."""

ParamOf = Callable[[str], str | None]
"""Names a request's field as the HTTP client knows it."""

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")
Metadata = tuple[tuple[str, str], ...]


class RouterClient:
    """Raises ApiError where a call fails."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def generate(
        self, generate: pb.GenerateRequest, metadata: Metadata, param_of: ParamOf
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yield what a router answers. Closing the generator cancels the call."""
        await self._reconnect()
        try:
            async with streaming(self._inference.Generate(generate, metadata=metadata)) as call:
                async for response in call:
                    yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, param_of) from error

    async def list_models(self, metadata: Metadata) -> list[pb.Model]:
        """Return one of each name."""
        await self._reconnect()
        call = self._inference.ListModels(pb.ListModelsRequest(), timeout=UNARY_TIMEOUT_S, metadata=metadata)
        listed = await _answer(call, str)
        return list({model.name: model for model in listed.models}.values())

    async def tokenize(
        self, tokenize: pb.TokenizeRequest, metadata: Metadata, param_of: ParamOf
    ) -> pb.TokenizeResponse:
        await self._reconnect()
        return await _answer(self._inference.Tokenize(tokenize, timeout=UNARY_TIMEOUT_S, metadata=metadata), param_of)

    async def detokenize(
        self, detokenize: pb.DetokenizeRequest, metadata: Metadata, param_of: ParamOf
    ) -> pb.DetokenizeResponse:
        await self._reconnect()
        call = self._inference.Detokenize(detokenize, timeout=UNARY_TIMEOUT_S, metadata=metadata)
        return await _answer(call, param_of)

    async def is_serving(self) -> bool:
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _reconnect(self) -> None:
        """Wait until there is a connection, which there is as a rule. After a while the call itself says what fails."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT_TIMEOUT_S):
                await self._channel.channel_ready()


async def _answer(call: grpc.aio.UnaryUnaryCall[_Asked, _Answer], param_of: ParamOf) -> _Answer:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error, param_of) from error


def metadata_of(request: Request) -> Metadata:
    """Return what goes with the calls made for a request: its trace, and who asks. Raises ApiError.

    Who may ask for what is the router's to say.
    """
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        raise ApiError(400, "Authorization: must be given once", "Authorization", "invalid_value")
    for value in given:
        if len(value) > MAX_AUTHORIZATION_BYTES:
            message = f"Authorization: must be at most {MAX_AUTHORIZATION_BYTES} bytes long"
            raise ApiError(400, message, "Authorization", "invalid_value")
        if not (value.isascii() and value.isprintable()):
            raise ApiError(400, "Authorization: must be printable ASCII", "Authorization", "invalid_value")
    return (*current_span().metadata, *(("authorization", value) for value in given if value))
