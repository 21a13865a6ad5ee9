"""InferenceService at a replica, for clients that ask a router where to go and keep it out of the token path."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn

import grpc

from kvern.services.detokenizer.callers import INFERENCE_SERVICE, Callers
from kvern.services.detokenizer.frames import ServeFrames
from kvern.services.detokenizer.front_door import FrontDoor
from kvern.services.detokenizer.request_log import log_direct
from kvern.services.runtime.errors import AlreadyExists, NotFound, Unauthenticated, Unavailable, Unsupported
from kvern.services.runtime.ticket import Ticket
from kvern.services.runtime.validate import check_generate
from kvern.v1 import inference_pb2, inference_pb2_grpc, replica_pb2

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Runs requests whose prompts are token ids; all that needs texts or other replicas is the router's."""

    def __init__(self, door: FrontDoor, callers: Callers) -> None:
        self._door = door
        self._callers = callers
        self._requests: set[tuple[str, str]] = set()
        self._rng = random.Random()

    async def Generate(  # type: ignore[override]  # yields what is serialized already
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[bytes]:
        with log_direct("direct", context.time_remaining) as record:
            record.request_id = request.request_id
            ticket = self._callers.ticket_of(context)
            record.tenant = "" if ticket is None else ticket.tenant
            check_generate(request)
            _refuse_texts(request)
            record.model = self._check_model(request.model, ticket)
            with self._hold(request.request_id, record.tenant) as record.request_id:
                serve = to_serve(request, record.request_id, record.model, ticket, self._rng)
                record.prompt_tokens = len(serve.request.token_ids.ids)
                frames = ServeFrames(tells_ids=request.output.token_ids)
                async with aclosing(self._door.run(serve, frames, context.time_remaining(), record)) as responses:
                    async for response in responses:
                        yield response.client_frame

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        self._callers.ticket_of(context)
        response = inference_pb2.ListModelsResponse()
        if (info := self._door.engine.info) is not None:
            response.models.add(
                name=info.model,
                max_context=info.max_model_len,
                vocab_size=info.vocab_size,
                block_size=info.block_size,
                contract=info.contract,
                ready_replicas=1,
            )
        return response

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: _Context) -> NoReturn:
        raise Unsupported("prompt", "a replica takes token ids; ask a router to tokenize")

    async def Detokenize(self, request: inference_pb2.DetokenizeRequest, context: _Context) -> NoReturn:
        raise Unsupported("ids", "a replica decodes only what it generates; ask a router to detokenize")

    async def Route(self, request: inference_pb2.RouteRequest, context: _Context) -> NoReturn:
        raise Unsupported("request", "a replica knows of no others; ask a router to route")

    def _check_model(self, name: str, ticket: Ticket | None) -> str:
        """Return the model that is served. Raises Unavailable, NotFound for another one, Unauthenticated."""
        if self._door.engine.info is None:
            raise Unavailable("the engine is away")
        model = self._door.engine.info.model
        if name not in ("", model):
            raise NotFound(f"model {name!r} is not served here; served: {model}", reason="MODEL_NOT_FOUND")
        if ticket is not None and ticket.model != model:
            raise Unauthenticated("the ticket is for another model", reason="TICKET_INVALID")
        return model

    @contextmanager
    def _hold(self, request_id: str, tenant: str) -> Iterator[str]:
        """Keep an id, made up if it is empty, apart from those of its tenant's other calls. Raises AlreadyExists."""
        if (tenant, request_id) in self._requests:
            raise AlreadyExists(f"request_id {request_id!r} is in flight")
        request_id = request_id or uuid.uuid4().hex
        self._requests.add((tenant, request_id))
        try:
            yield request_id
        finally:
            self._requests.remove((tenant, request_id))


def to_serve(
    request: inference_pb2.GenerateRequest, request_id: str, model: str, ticket: Ticket | None, rng: random.Random
) -> replica_pb2.ServeRequest:
    """Complete a client's request as a router does. Of whom it is, the ticket says."""
    serve = replica_pb2.ServeRequest(request=request)
    completed = serve.request
    completed.request_id, completed.model = request_id, model
    if request.HasField("keep_last_tokens"):
        del completed.token_ids.ids[: -request.keep_last_tokens]
    if request.HasField("resume"):
        completed.sampling.seed = request.resume.seed
    elif not request.sampling.HasField("seed"):
        completed.sampling.seed = rng.getrandbits(64)
    if ticket is not None:
        completed.cache.salt = ticket.salt
        if ticket.priority_cap is not None:
            completed.priority = max(request.priority, ticket.priority_cap)
    return serve


def _refuse_texts(request: inference_pb2.GenerateRequest) -> None:
    kind = request.WhichOneof("prompt") or "prompt"
    if kind != "token_ids":
        raise Unsupported(kind, "a replica takes token_ids; Route returns them for any prompt")
    if request.sampling.bad_words:
        raise Unsupported("sampling.bad_words", "a replica takes token ids only; ask a router")


def add_to_server(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Register the service."""
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    # Generate again, without a serializer: its frames are bytes already.
    generate: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
        servicer.Generate, request_deserializer=inference_pb2.GenerateRequest.FromString
    )
    server.add_registered_method_handlers(INFERENCE_SERVICE, {"Generate": generate})
