"""The tokenizer beside this router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.router.deadline import for_tokenizer
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.errors import Unavailable
from kvern.services.runtime.tls import ClientTls
from kvern.services.runtime.tracing import current_span
from kvern.v1 import tokenizer_pb2, tokenizer_pb2_grpc

SERVICE = "kvern.v1.TokenizerService"

HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 1.0

RECONNECT_TIMEOUT_S = 2.0
"""How long a call waits for a tokenizer that went away to be back."""

TimeRemaining = Callable[[], float | None]
"""Seconds until the client's deadline, None if it set none."""

_Request = TypeVar("_Request", contravariant=True)
_Response = TypeVar("_Response", covariant=True)


_Metadata = tuple[tuple[str, str], ...]


class _Method(Protocol[_Request, _Response]):
    def __call__(self, request: _Request, *, metadata: _Metadata) -> Awaitable[_Response]: ...


class Tokenizer:
    """Calls to the tokenizer, and whether it serves. `watch` keeps `is_serving` true to fact."""

    def __init__(self, address: str, on_change: Callable[[], None], tls: ClientTls | None = None) -> None:
        self.is_serving = False
        self.models: list[str] = []
        """Those that it said it has."""
        self.digest_key: str | None = None
        """Fingerprint of its key of block digests, empty for the key that everybody knows; None until it has said."""
        self._on_change = on_change
        self._channel = open_channel(address, tls=tls)
        self._stub = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def encode(
        self, request: tokenizer_pb2.EncodePromptRequest, time_remaining: TimeRemaining
    ) -> tokenizer_pb2.EncodePromptResponse:
        """Return a prompt's token ids.

        Raises AioRpcError with the tokenizer's verdict, Unavailable if it is away or takes more than its share of the
        deadline.
        """
        with current_span().call(f"{SERVICE}/EncodePrompt") as span:
            return await self._call(self._stub.EncodePrompt, request, span.metadata, time_remaining)

    async def decode(
        self, request: tokenizer_pb2.DecodeTokensRequest, time_remaining: TimeRemaining
    ) -> tokenizer_pb2.DecodeTokensResponse:
        """Return the text of token ids. Raises as `encode` does."""
        with current_span().call(f"{SERVICE}/DecodeTokens") as span:
            return await self._call(self._stub.DecodeTokens, request, span.metadata, time_remaining)

    async def watch(self) -> None:
        """Ask for ever how it is, and what."""
        while True:
            is_serving = await self._check_health()
            if is_serving:  # each time: another one may have taken its place in between
                await self._ask_what_it_is()
            self.is_serving = is_serving
            self._on_change()
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def close(self) -> None:
        await self._channel.close()

    async def _call(
        self,
        method: _Method[_Request, _Response],
        request: _Request,
        metadata: _Metadata,
        time_remaining: TimeRemaining,
    ) -> _Response:
        try:
            async with asyncio.timeout(for_tokenizer(time_remaining())):
                return await self._call_twice(method, request, metadata)
        except TimeoutError as error:
            raise Unavailable("the tokenizer took more than its share of the deadline") from error

    async def _call_twice(
        self, method: _Method[_Request, _Response], request: _Request, metadata: _Metadata
    ) -> _Response:
        try:
            return await method(request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        await self._reconnect()
        try:
            return await method(request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            raise Unavailable("the tokenizer is away") from error

    async def _reconnect(self) -> None:
        try:
            async with asyncio.timeout(RECONNECT_TIMEOUT_S):
                await self._channel.channel_ready()
        except TimeoutError as error:
            raise Unavailable("the tokenizer is away") from error

    async def _check_health(self) -> bool:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            response = await self._health.Check(request, timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _ask_what_it_is(self) -> None:
        """Keep what it said before where it does not answer."""
        try:
            info = await self._stub.GetTokenizerInfo(tokenizer_pb2.GetTokenizerInfoRequest(), timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return
        self.models, self.digest_key = [tokenizer.model for tokenizer in info.tokenizers], info.digest_key
