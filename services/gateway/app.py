"""The HTTP gateway's routes: OpenAI's API in front of InferenceService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import grpc
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvern.services.gateway import answers
from kvern.services.gateway.access import Access, RequestRecord, record_of
from kvern.services.gateway.chat_request import NO_FORMAT, ChatCompletionRequest, OutputFormats
from kvern.services.gateway.chat_response import ChatAnswer, parser_opener
from kvern.services.gateway.client_watch import ClientWatch
from kvern.services.gateway.completion_request import CompletionRequest
from kvern.services.gateway.completion_response import CompletionAnswer
from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.event_stream import EventStream
from kvern.services.gateway.generation_body import GenerationBody
from kvern.services.gateway.head import Head
from kvern.services.gateway.merge import merged
from kvern.services.gateway.metrics import GatewayMetrics
from kvern.services.gateway.openapi import describe
from kvern.services.gateway.parsing import OutputParser
from kvern.services.gateway.reasoning_probe import ReasoningProbe
from kvern.services.gateway.request_body import parse, parse_either
from kvern.services.gateway.request_tracing import RequestTracing
from kvern.services.gateway.router_client import Metadata, RouterClient, metadata_of
from kvern.services.gateway.tokenize_request import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from kvern.services.gateway.usage import Tally
from kvern.services.runtime.metrics import CONTENT_TYPE, render
from kvern.services.runtime.tracing import NO_TRACER, Tracer
from kvern.version import __version__

HEALTH_INTERVAL_S = 1.0

_MODELS, _COMPLETIONS, _CHAT_COMPLETIONS = "/v1/models", "/v1/completions", "/v1/chat/completions"
_TOKENIZE, _DETOKENIZE = "/tokenize", "/detokenize"
_TRACED = frozenset({_MODELS, _COMPLETIONS, _CHAT_COMPLETIONS, _TOKENIZE, _DETOKENIZE})
"""What is traced: probes are not."""

_HEALTH, _METRICS = "/health", "/metrics"
_PROBES = frozenset({_HEALTH, _METRICS})


class Gateway:
    """Answers HTTP requests by calls to a router."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        registry: CollectorRegistry,
        formats: OutputFormats,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._router = RouterClient(channel)
        self._probe = ReasoningProbe(self._router)
        self._registry = registry
        self._formats = formats
        self._tracer = tracer
        self._started_at_s = int(time.time())
        self.is_draining = False

    def app(self, metrics: GatewayMetrics) -> Starlette:
        routes = [
            Route(_MODELS, self.list_models, methods=["GET"]),
            Route(f"{_MODELS}/{{model:path}}", self.get_model, methods=["GET"]),
            Route(_COMPLETIONS, self.complete, methods=["POST"]),
            Route(_CHAT_COMPLETIONS, self.complete_chat, methods=["POST"]),
            Route(_TOKENIZE, self.tokenize, methods=["POST"]),
            Route(_DETOKENIZE, self.detokenize, methods=["POST"]),
            Route(_HEALTH, self.check_health, methods=["GET"]),
            Route("/version", self.tell_version, methods=["GET"]),
            Route(_METRICS, self.tell_metrics, methods=["GET"]),
            Route("/openapi.json", self.tell_openapi, methods=["GET"]),
        ]
        access = Middleware(Access, metrics, routes, _PROBES, lambda: self.is_draining)
        app = Starlette(
            routes=routes,
            middleware=[*self._tracing, access, Middleware(ClientWatch)],
            exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_fault},
        )
        # Behind what ends TLS, clients would be sent to plain HTTP, with their keys.
        app.router.redirect_slashes = False
        return app

    @property
    def _tracing(self) -> list[Middleware]:
        return [Middleware(RequestTracing, self._tracer, _TRACED)] if self._tracer.is_on else []

    async def list_models(self, request: Request) -> Response:
        return answers.ModelList(object="list", data=await self._models(request)).to_response()

    async def get_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        for model in await self._models(request):
            if model.id == name:
                return model.to_response()
        raise ApiError(404, f"model: {name} is not served here", "model", "model_not_found")

    async def complete(self, request: Request) -> Response:
        body = await parse(CompletionRequest, request)
        body.check()
        record, metadata = record_of(request), metadata_of(request)
        request_id, record.tally = _identify(record, body), Tally()
        generates = body.to_generate()
        for number, generate in enumerate(generates):
            generate.request_id = request_id if len(generates) == 1 else f"{request_id}-{number}"
        calls = [
            self._router.generate(generate, metadata, partial(body.param_in, number))
            for number, generate in enumerate(generates)
        ]
        answer = CompletionAnswer(body, Head(f"cmpl-{request_id}"), record.tally)
        if body.stream:
            return EventStream(answer.events(merged(calls)))
        return (await answer.whole(merged(calls))).to_response()

    async def complete_chat(self, request: Request) -> Response:
        body = await parse(ChatCompletionRequest, request)
        body.check()
        record, metadata = record_of(request), metadata_of(request)
        generate = body.to_generate(self._formats)
        generate.request_id, record.tally = _identify(record, body), Tally()
        responses = self._router.generate(generate, metadata, body.param_of)
        find_opener = partial(self._find_opener, body, metadata)
        answer = ChatAnswer(body, find_opener, Head(f"chatcmpl-{generate.request_id}"), record.tally)
        if body.stream:
            return EventStream(answer.events(responses))
        return (await answer.whole(responses)).to_response()

    async def tokenize(self, request: Request) -> Response:
        body = await parse_either(TokenizeChatRequest, TokenizeRequest, "messages", request)
        tokenized = await self._router.tokenize(body.to_proto(), metadata_of(request), body.param_of)
        return answers.Tokenized(
            count=len(tokenized.ids), max_model_len=tokenized.max_context, tokens=list(tokenized.ids), token_strs=None
        ).to_response()

    async def detokenize(self, request: Request) -> Response:
        body = await parse(DetokenizeRequest, request)
        detokenized = await self._router.detokenize(body.to_proto(), metadata_of(request), body.param_of)
        return answers.Detokenized(prompt=detokenized.text).to_response()

    async def check_health(self, request: Request) -> Response:
        is_serving = await self._serves()
        answer = answers.Health(status="ok" if is_serving else "unavailable").to_response()
        answer.status_code = 200 if is_serving else 503
        return answer

    async def tell_version(self, request: Request) -> Response:
        return answers.Version(version=__version__).to_response()

    async def tell_metrics(self, request: Request) -> Response:
        # Thousands of series take milliseconds, in which the loop would stand still.
        return Response(await asyncio.to_thread(render, self._registry), media_type=CONTENT_TYPE)

    async def tell_openapi(self, request: Request) -> Response:
        return Response(describe(), media_type="application/json")

    async def watch(self, set_ready: Callable[[bool], None]) -> None:
        """Tell for ever whether requests can be served: they can while the router serves, until the gateway drains."""
        while True:
            set_ready(await self._serves())
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _serves(self) -> bool:
        # In this order: a drain may begin while the router is asked.
        return await self._router.is_serving() and not self.is_draining

    async def _find_opener(
        self, body: ChatCompletionRequest, metadata: Metadata, model: str
    ) -> Callable[[], OutputParser]:
        may_reason = self._formats.reasoning != NO_FORMAT and body.may_reason
        begins_in_reasoning = may_reason and await self._probe.begins_in_reasoning(body, model, metadata)
        return parser_opener(body, self._formats, begins_in_reasoning=begins_in_reasoning)

    async def _models(self, request: Request) -> list[answers.Model]:
        return [
            answers.Model(
                id=model.name,
                object="model",
                created=self._started_at_s,
                owned_by="kvern",
                max_model_len=model.max_context,
            )
            for model in await self._router.list_models(metadata_of(request))
        ]


def _identify(record: RequestRecord, body: GenerationBody) -> str:
    """Return what the router is to call a request. The body's word is taken as it is."""
    if body.request_id is None:
        return record.unique_id
    record.request_id = body.request_id
    return body.request_id


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response


async def _on_fault(request: Request, error: Exception) -> Response:
    return ApiError(500, "the gateway failed; its log has more").response
