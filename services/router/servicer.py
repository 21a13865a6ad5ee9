"""InferenceService: what clients call."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from kvern.services.router.admin import RouterServicer
from kvern.services.router.admission import Admission
from kvern.services.router.confinement import confine, text_scope
from kvern.services.router.convert import num_resumed_tokens, to_decode, to_encode, to_serve
from kvern.services.router.deadline import for_start
from kvern.services.router.identity.caller import Caller, Role, current_caller
from kvern.services.router.identity.salts import Salts
from kvern.services.router.limits import Kind, TenantLimits
from kvern.services.router.metrics import RouterMetrics
from kvern.services.router.models import check_allowed, list_models, max_context, resolve_model
from kvern.services.router.placement import Placement, Placer
from kvern.services.router.relay import Relay, Repeats
from kvern.services.router.replica_table import ReplicaTable
from kvern.services.router.request_log import RequestRecord, log_call, log_request
from kvern.services.router.tokenizer import TimeRemaining, Tokenizer
from kvern.services.runtime.errors import InvalidArgument
from kvern.services.runtime.slow_reader import ReaderWatch
from kvern.services.runtime.ticket import LIFE_S, Ticket, TicketKeys
from kvern.services.runtime.validate import check_chat, check_generate, check_name
from kvern.v1 import inference_pb2, inference_pb2_grpc, router_pb2_grpc, tokenizer_pb2

INFERENCE_SERVICE = "kvern.v1.InferenceService"

REPLICA_METADATA_KEY = "kvern-replica"
"""Trailing metadata of Generate: address of the replica that served it. What else admins get explains the choice."""

Metadata = tuple[tuple[str, str], ...]

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Validates, tokenizes, chooses, relays."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        table: ReplicaTable,
        placer: Placer,
        repeats: Repeats,
        admission: Admission,
        max_stalled_s: float,
        metrics: RouterMetrics,
        limits: TenantLimits,
        salts: Salts | None = None,
        tickets: TicketKeys | None = None,
    ) -> None:
        """salts: keep tenants' cached prompts apart; None: there are no tenants. tickets: what Route signs them with;
        None: it gives none.
        """
        self._tokenizer = tokenizer
        self._table = table
        self._placer = placer
        self._repeats = repeats
        self._max_stalled_s = max_stalled_s
        self._admission = admission
        self._metrics = metrics
        self._limits = limits
        self._salts = salts
        self._tickets = tickets
        self._rng = random.Random()

    async def Generate(  # type: ignore[override]  # yields what replicas serialized
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[bytes]:
        metrics = self._metrics.begin(request.model)
        with log_request(metrics, context.time_remaining) as record:
            record.request_id = request.request_id
            check_generate(request)
            caller = current_caller()
            confine(request, caller, self._salts)
            with self._admission.admit(request.request_id, caller.tenant) as record.request_id:
                async with self._limits.admit(caller, Kind.GENERATE) as usage:
                    placement, encoded = await self._prepare(request, context.time_remaining)
                    record.model = placement.model
                    metrics.resolve(placement.model)
                    record.prompt_tokens = len(encoded.token_ids)
                    usage.charge(record.prompt_tokens + num_resumed_tokens(request))
                    serve = to_serve(request, record.request_id, record.model, encoded, self._rng)
                    relay = Relay(self._table, placement, serve, record, self._repeats, metrics)
                    reader = ReaderWatch(self._max_stalled_s)
                    try:
                        async with aclosing(relay.frames(context.time_remaining)) as frames:
                            with reader:
                                async for frame in frames:
                                    reader.hold()
                                    yield frame
                                    reader.release()
                    finally:
                        usage.charge(record.completion_tokens)
                        record.verdict = reader.verdict
                        _record_outcome(record, placement)
                        context.set_trailing_metadata(_trailing(record, placement, caller))

    async def Route(self, request: inference_pb2.RouteRequest, context: _Context) -> inference_pb2.RouteResponse:
        with log_call("Route", request.request.model, context.time_remaining):
            return await self._route(request.request, context.time_remaining)

    async def _route(
        self, request: inference_pb2.GenerateRequest, time_remaining: TimeRemaining
    ) -> inference_pb2.RouteResponse:
        check_generate(request)
        caller = current_caller()
        confine(request, caller, self._salts)
        async with self._limits.admit(caller, Kind.OTHER) as usage:
            placement, encoded = await self._prepare(request, time_remaining)
            if self._tickets is not None:  # with a ticket the prompt will be computed, and no router sees it again
                usage.charge(len(encoded.token_ids) + num_resumed_tokens(request))
        candidates = placement.ranked()
        best = candidates[0]
        return inference_pb2.RouteResponse(
            replica=best.replica,
            address=best.address,
            prompt_tokens=len(encoded.token_ids),
            matched_tokens=best.matched_tokens,
            candidates=[
                inference_pb2.Candidate(replica=each.replica, matched_tokens=each.matched_tokens, cost=each.cost)
                for each in candidates
            ],
            prompt_token_ids=encoded.token_ids,
            ticket=self._ticket(request, placement.model),
        )

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        with log_call("Tokenize", request.model, context.time_remaining):
            check_name("model", request.model)
            if request.WhichOneof("prompt") is None:
                raise InvalidArgument("prompt", "missing; give text or chat")
            if request.HasField("chat"):
                check_chat(request.chat)
            caller = current_caller()
            model = resolve_model(self._table, request.model, caller.policy)
            encode = to_encode(request, model, scope=text_scope(caller, self._salts))
            async with self._limits.admit(caller, Kind.OTHER):
                encoded = await self._tokenizer.encode(encode, context.time_remaining)
            return inference_pb2.TokenizeResponse(ids=encoded.token_ids, max_context=max_context(self._table, model))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        with log_call("Detokenize", request.model, context.time_remaining):
            check_name("model", request.model)
            caller = current_caller()
            model = resolve_model(self._table, request.model, caller.policy)
            async with self._limits.admit(caller, Kind.OTHER):
                decoded = await self._tokenizer.decode(to_decode(request, model), context.time_remaining)
            return inference_pb2.DetokenizeResponse(text=decoded.text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        with log_call("ListModels", "", context.time_remaining):
            return inference_pb2.ListModelsResponse(models=list_models(self._table, current_caller().policy))

    def _ticket(self, request: inference_pb2.GenerateRequest, model: str) -> bytes:
        """Return what lets a client run a request at a replica itself, nothing where no tickets are given."""
        if self._tickets is None:
            return b""
        caller = current_caller()
        ticket = Ticket(
            tenant=caller.tenant,
            salt=request.cache.salt,
            model=model,
            priority_cap=caller.policy.priority_cap,
            expires_at=time.time() + LIFE_S,
        )
        return self._tickets.sign(ticket)

    async def _prepare(
        self, request: inference_pb2.GenerateRequest, time_remaining: TimeRemaining
    ) -> tuple[Placement, tokenizer_pb2.EncodePromptResponse]:
        """Return where a request may go, to replicas of the model it means, and its texts as token ids."""
        arrived_at = time.monotonic()
        policy = current_caller().policy
        check_allowed(self._table, request.model, policy)
        await self._table.wait_while_starting(request.model, for_start(time_remaining()))
        model = resolve_model(self._table, request.model, policy)
        self._table.candidates(model)  # better to fail here than after tokenizing
        contracts = self._placer.contracts(request, model)
        tokenized_at = time.monotonic()
        with self._metrics.tokenize.time():
            encoded = await self._tokenizer.encode(to_encode(request, model, contracts), time_remaining)
        tokenize_s = time.monotonic() - tokenized_at
        digests = dict(zip(contracts, encoded.block_digests, strict=True))
        placement = await self._placer.place(request, model, len(encoded.token_ids), digests, time_remaining())
        self._metrics.placement.observe(time.monotonic() - arrived_at - tokenize_s)
        return placement, encoded


def _trailing(record: RequestRecord, placement: Placement, caller: Caller) -> Metadata:
    """Say which replica served a request, and to admins why: how busy it was tells what other tenants ask for."""
    explanation = placement.metadata(record.replica) if caller.has(Role.ADMIN) else ()
    return ((REPLICA_METADATA_KEY, record.replica), *explanation)


def _record_outcome(record: RequestRecord, placement: Placement) -> None:
    if (sent := placement.sent_to(record.replica)) is not None:
        record.matched_tokens, record.cached_tokens = sent.candidate.matched_tokens, sent.cached_tokens


def add_to_server(inference: InferenceServicer, router: RouterServicer, server: grpc.aio.Server) -> None:
    """Register both services."""
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    # Generate again, without a serializer: its frames are bytes already.
    generate: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
        inference.Generate, request_deserializer=inference_pb2.GenerateRequest.FromString
    )
    server.add_registered_method_handlers(INFERENCE_SERVICE, {"Generate": generate})
