"""A router that does what a test tells it: a real gRPC server, no tokenizer or replica behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvern.services.runtime.channel import SERVER_OPTIONS
from kvern.services.runtime.interceptors import ErrorInterceptor
from kvern.services.runtime.validate import check_generate
from kvern.v1 import inference_pb2, inference_pb2_grpc
from kvern.v1.inference_pb2 import (
    Delta,
    DetokenizeRequest,
    DetokenizeResponse,
    Finished,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    Scheduled,
    Started,
    TokenizeRequest,
    TokenizeResponse,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from tests.for_ever import for_ever

Behaviour = Callable[[GenerateRequest], AsyncIterator[GenerateResponse]]
Context = grpc.aio.ServicerContext[Any, Any]

STARTED = GenerateResponse(started=Started(request_id="r1", model="tiny", prompt_tokens=7))
SCHEDULED = GenerateResponse(scheduled=Scheduled(cached_tokens=4))


def delta(text: str, index: int = 0, num_tokens: int = 1, logprobs: Sequence[TokenLogprobs] = ()) -> GenerateResponse:
    return GenerateResponse(delta=Delta(index=index, text=text, token_ids=range(num_tokens), logprobs=logprobs))


def logprob(token: str | bytes, value: float, **top: float) -> TokenLogprobs:
    """What is told of a token, and of the most likely ones."""
    sampled = TokenLogprob(token=token.encode() if isinstance(token, str) else token, logprob=value)
    tops = [TokenLogprob(token=name.encode(), logprob=each) for name, each in top.items()]
    return TokenLogprobs(sampled=sampled, top=tops)


def finished(
    reason: inference_pb2.FinishReason.ValueType = inference_pb2.FINISH_REASON_STOP,
    index: int = 0,
    error: str = "",
    error_reason: str = "",
) -> GenerateResponse:
    usage = Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=2)
    ended = Finished(index=index, reason=reason, usage=usage, error=error, error_reason=error_reason)
    return GenerateResponse(finished=ended)


def says(text: str, size: int = 0) -> Behaviour:
    """Answer with a text, in pieces of some characters or whole."""
    step = size or len(text)
    pieces = [delta(text[start : start + step]) for start in range(0, len(text), step)]
    return responds(STARTED, *pieces, finished())


def responds(*responses: GenerateResponse) -> Behaviour:
    async def behaviour(request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
        for response in responses:
            yield response

    return behaviour


def stalls_after(*responses: GenerateResponse) -> Behaviour:
    async def behaviour(request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
        for response in responses:
            yield response
        await for_ever()

    return behaviour


def fails_after(error: Exception, *responses: GenerateResponse) -> Behaviour:
    async def behaviour(request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
        for response in responses:
            yield response
        raise error

    return behaviour


def together(num_calls: int, behaviour: Behaviour) -> Behaviour:
    """Begin once so many calls are there: one that another's failure cancels on its way may come in a later test."""
    all_are_there = asyncio.Barrier(num_calls)

    async def waiting(request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
        await all_are_there.wait()
        async for response in behaviour(request):
            yield response

    return waiting


class ScriptedRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Checks requests as a router does, then behaves as told. A token is a byte."""

    def __init__(self) -> None:
        self.health = health.aio.HealthServicer()
        self.behaviour = responds(STARTED, delta("Hi"), finished())
        self.received: list[GenerateRequest] = []
        self.tokenized: list[TokenizeRequest] = []
        self.authorizations: list[str | None] = []
        """What each call brought, of whatever method."""
        self.expect_call()

    def expect_call(self) -> None:
        """Forget earlier calls, also those that have not quite ended."""
        self.received.clear()
        self.tokenized.clear()
        self.authorizations.clear()
        self.begun = asyncio.Semaphore(0)
        """Released for each Generate call that has come."""
        self.ended = asyncio.Event()

    async def Generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[GenerateResponse]:
        self._note(context)
        check_generate(request)
        self.received.append(request)
        self.begun.release()
        ended = self.ended
        try:
            async for response in self.behaviour(request):
                yield response
        finally:
            ended.set()

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        self._note(context)
        self.tokenized.append(request)
        opening = "<think>\n" if "thinking" in request.chat.template_kwargs_json else ""
        return TokenizeResponse(ids=request.text.encode() or f"chat{opening}".encode(), max_context=99)

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        self._note(context)
        return DetokenizeResponse(text=bytes(request.ids).decode())

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        self._note(context)
        return ListModelsResponse(
            models=[Model(name=name, ready_replicas=1, max_context=99) for name in ("tiny", "org/large", "tiny")]
        )

    def _note(self, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self.authorizations.append(metadata.get("authorization"))

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.health.set("", status)

    @asynccontextmanager
    async def serving(self, address: str) -> AsyncIterator[None]:
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        await self.set_serving(True)
        server.add_insecure_port(address)
        await server.start()
        try:
            yield
        finally:
            await server.stop(0)
