"""Peers of a router that do what a test tells them: real gRPC servers, no model behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvern.engine.block_hash import extend_digests, root_digest
from kvern.services.runtime.channel import SERVER_OPTIONS
from kvern.services.runtime.errors import Internal, Unavailable
from kvern.services.runtime.interceptors import ErrorInterceptor
from kvern.v1 import inference_pb2 as inference
from kvern.v1 import replica_pb2 as replica
from kvern.v1 import replica_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from tests.for_ever import for_ever

MODEL = "tiny"
CONTEXT = 128

Behaviour = Callable[[inference.GenerateRequest], AsyncIterator[replica.ServeResponse]]


def digests_of(token_ids: Sequence[int], hashing: tokenizer_pb2.BlockHashing) -> bytes:
    """Return the digests of the full blocks, joined."""
    root = root_digest(hashing.contract, hashing.salt, hashing.adapter)
    return b"".join(extend_digests(root, token_ids, hashing.block_size))


def frame(event: inference.GenerateResponse) -> replica.ServeResponse:
    return replica.ServeResponse(client_frame=event.SerializeToString())


def started(request: inference.GenerateRequest) -> replica.ServeResponse:
    return frame(
        inference.GenerateResponse(
            started=inference.Started(
                request_id=request.request_id,
                model=request.model,
                prompt_tokens=len(request.token_ids.ids),
                seed=request.sampling.seed,
            )
        )
    )


def scheduled(cached_tokens: int) -> replica.ServeResponse:
    told = frame(inference.GenerateResponse(scheduled=inference.Scheduled(cached_tokens=cached_tokens)))
    told.cached_tokens = cached_tokens
    return told


def delta(text: str) -> replica.ServeResponse:
    return frame(inference.GenerateResponse(delta=inference.Delta(text=text)))


async def answer(request: inference.GenerateRequest) -> AsyncIterator[replica.ServeResponse]:
    yield started(request)
    yield delta("Hello")
    yield frame(inference.GenerateResponse(finished=inference.Finished(reason=inference.FINISH_REASON_STOP)))


async def be_unavailable(request: inference.GenerateRequest) -> AsyncIterator[replica.ServeResponse]:
    raise Unavailable("the engine is away")
    yield started(request)


async def fail(request: inference.GenerateRequest) -> AsyncIterator[replica.ServeResponse]:
    raise Internal("a fault")
    yield started(request)


async def stall_after_start(request: inference.GenerateRequest) -> AsyncIterator[replica.ServeResponse]:
    yield started(request)
    await for_ever()


async def stall(request: inference.GenerateRequest) -> AsyncIterator[replica.ServeResponse]:
    await for_ever()
    yield started(request)


async def flood(request: inference.GenerateRequest) -> AsyncIterator[replica.ServeResponse]:
    yield started(request)
    while True:
        yield delta("x" * 1000)


@dataclass
class ScriptedReplica(replica_pb2_grpc.ReplicaServiceServicer):
    """A replica of one model. Its behaviour and state can be changed while it serves."""

    address: str
    behaviour: Behaviour = answer
    state: replica.ReplicaState = replica.REPLICA_STATE_READY
    answers_polls: bool = True
    epoch: int = 1
    contract: str = "c"
    digest_key: str = ""
    num_resets: int = 0
    load: replica.ReplicaLoad = field(default_factory=replica.ReplicaLoad)
    received: list[inference.GenerateRequest] = field(default_factory=list)
    last: replica.ServeRequest = field(default_factory=replica.ServeRequest)
    """The last request, whole."""
    time_remaining: float | None = None
    """Of the last request, when it came."""
    num_sent: int = 0
    """Messages of all Serve calls."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a Serve call that began since the last reset has ended, in whatever way."""
    has_failed: bool = False
    """Whether a Serve call has failed since the last reset."""

    def reset(self) -> None:
        self.behaviour, self.state, self.load = answer, replica.REPLICA_STATE_READY, replica.ReplicaLoad()
        self.contract, self.epoch = "c", 1
        self.answers_polls, self.has_failed = True, False
        self.received.clear()
        self.num_sent = 0
        self.ended = asyncio.Event()

    async def Serve(
        self, request: replica.ServeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[replica.ServeResponse]:
        self.received.append(request.request)
        self.last = request
        self.time_remaining = context.time_remaining()
        ended = self.ended
        try:
            async for response in self.behaviour(request.request):
                self.num_sent += 1
                yield response
        except Exception:
            self.has_failed = True
            raise
        finally:
            ended.set()

    async def GetReplicaInfo(
        self, request: replica.GetReplicaInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> replica.GetReplicaInfoResponse:
        if not self.answers_polls:
            raise Unavailable("gone")
        engine = replica.EngineInfo(
            epoch=self.epoch,
            model=MODEL,
            contract=self.contract,
            block_size=16,
            max_model_len=CONTEXT,
            vocab_size=256,
            digest_key=self.digest_key,
        )
        return replica.GetReplicaInfoResponse(state=self.state, engine=engine, load=self.load)

    async def SetDraining(
        self, request: replica.SetDrainingRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> replica.SetDrainingResponse:
        if request.draining:
            self.state = replica.REPLICA_STATE_DRAINING
        elif self.state == replica.REPLICA_STATE_DRAINING:
            self.state = replica.REPLICA_STATE_READY
        return replica.SetDrainingResponse()

    async def DropCache(
        self, request: replica.DropCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> replica.DropCacheResponse:
        self.num_resets += 1
        return replica.DropCacheResponse()


class ScriptedTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """One token a byte. `failures` is how many further calls find it away."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.failures = 0
        self.hangs = False
        self.digest_key = ""
        self.scopes: list[str] = []
        """Of all texts that came."""
        self.health = health.aio.HealthServicer()

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.health.set("kvern.v1.TokenizerService", status)

    async def EncodePrompt(
        self, request: tokenizer_pb2.EncodePromptRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tokenizer_pb2.EncodePromptResponse:
        if self.hangs:
            await for_ever()
        self.scopes.append(request.scope)
        if self.failures:
            self.failures -= 1
            raise Unavailable("restarting")
        text = request.text or "".join(message.content for message in request.chat.messages)
        token_ids = list(request.token_ids.ids or text.encode())
        return tokenizer_pb2.EncodePromptResponse(
            token_ids=token_ids, block_digests=[digests_of(token_ids, hashing) for hashing in request.hashings]
        )

    async def GetTokenizerInfo(
        self, request: tokenizer_pb2.GetTokenizerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tokenizer_pb2.GetTokenizerInfoResponse:
        return tokenizer_pb2.GetTokenizerInfoResponse(
            tokenizers=[tokenizer_pb2.TokenizerInfo(model=MODEL)], digest_key=self.digest_key
        )

    async def DecodeTokens(
        self, request: tokenizer_pb2.DecodeTokensRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tokenizer_pb2.DecodeTokensResponse:
        return tokenizer_pb2.DecodeTokensResponse(text=bytes(request.token_ids).decode())


@asynccontextmanager
async def serving(*servicers: ScriptedReplica | ScriptedTokenizer) -> AsyncIterator[None]:
    """Serve each at its own address."""
    servers = []
    for servicer in servicers:
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        if isinstance(servicer, ScriptedReplica):
            replica_pb2_grpc.add_ReplicaServiceServicer_to_server(servicer, server)
        else:
            tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server)
            health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
            await servicer.set_serving(True)
        server.add_insecure_port(servicer.address)
        await server.start()
        servers.append(server)
    try:
        yield
    finally:
        for server in servers:
            await server.stop(0)
