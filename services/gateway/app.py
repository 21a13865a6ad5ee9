"""The HTTP gateway's routes: OpenAI's API in front of InferenceService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvern.services.gateway.chat_request import ChatCompletionRequest
from kvern.services.gateway.chat_response import chunks, completion
from kvern.services.gateway.client_watch import ClientWatch
from kvern.services.gateway.errors import ApiError, from_rpc
from kvern.services.gateway.event_stream import EventStream
from kvern.services.gateway.metrics import GatewayMetrics, RequestCounter
from kvern.services.gateway.request_body import parse
from kvern.services.gateway.request_tracing import RequestTracing
from kvern.services.runtime.channel import streaming
from kvern.services.runtime.tracing import NO_TRACER, Tracer, current_span
from kvern.v1 import inference_pb2, inference_pb2_grpc

UNARY_TIMEOUT_S = 10.0
HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 1.0

_MODELS, _CHAT_COMPLETIONS = "/v1/models", "/v1/chat/completions"
_TRACED = frozenset({_MODELS, _CHAT_COMPLETIONS})
"""What is traced: probes are not."""


class Gateway:
    """Answers HTTP requests by calls to a router."""

    def __init__(self, channel: grpc.aio.Channel, metrics: GatewayMetrics, tracer: Tracer = NO_TRACER) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._started_at_s = int(time.time())
        self.is_draining = False

    @property
    def app(self) -> Starlette:
        routes = [
            Route(_MODELS, self.list_models, methods=["GET"]),
            Route(_CHAT_COMPLETIONS, self.complete_chat, methods=["POST"]),
            Route("/health", self.check_health, methods=["GET"]),
        ]
        counter = Middleware(RequestCounter, self._metrics, routes)
        return Starlette(
            routes=routes,
            middleware=[counter, *self._tracing, Middleware(ClientWatch)],
            exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_fault},
        )

    @property
    def _tracing(self) -> list[Middleware]:
        return [Middleware(RequestTracing, self._tracer, _TRACED)] if self._tracer.is_on else []

    async def list_models(self, request: Request) -> Response:
        try:
            listed = await self._inference.ListModels(
                inference_pb2.ListModelsRequest(), timeout=UNARY_TIMEOUT_S, metadata=current_span().metadata
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, str) from error
        names = dict.fromkeys(model.name for model in listed.models)
        data = [{"id": name, "object": "model", "created": self._started_at_s, "owned_by": "kvern"} for name in names]
        return JSONResponse({"object": "list", "data": data})

    async def complete_chat(self, request: Request) -> Response:
        body = parse(ChatCompletionRequest, await request.body())
        body.check()
        responses = self._generate(body)
        if not body.stream:
            async with aclosing(responses):
                return JSONResponse(await completion(responses))
        # Whatever fails up to here still has a status of its own.
        first = await anext(responses)
        return EventStream(chunks(first.started, responses, body.num_choices, include_usage=body.includes_usage))

    async def check_health(self, request: Request) -> Response:
        is_serving = await self._serves()
        return JSONResponse({"status": "ok" if is_serving else "unavailable"}, 200 if is_serving else 503)

    async def watch(self, set_ready: Callable[[bool], None]) -> None:
        """Tell for ever whether requests can be served: they can while the router serves, until the gateway drains."""
        while True:
            set_ready(await self._serves())
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _serves(self) -> bool:
        # In this order: a drain may begin while the router is asked.
        return await self._router_serves() and not self.is_draining

    async def _generate(self, body: ChatCompletionRequest) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        try:
            async with streaming(
                self._inference.Generate(body.to_generate(), metadata=current_span().metadata)
            ) as call:
                async for response in call:
                    yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, body.param_of) from error

    async def _router_serves(self) -> bool:
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response


async def _on_fault(request: Request, error: Exception) -> Response:
    return ApiError(500, "the gateway failed; its log has more").response
