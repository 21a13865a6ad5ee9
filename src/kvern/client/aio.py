"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvern.client.api_key import key_metadata
from kvern.client.channel import DEFAULT_ADDRESS, open_aio_channel, ticket_metadata
from kvern.client.errors import KvernError, from_rpc
from kvern.client.generation import Generation
from kvern.client.options import CallOptions, ChatOptions, GenerateOptions, Timeouts
from kvern.client.progress import Event
from kvern.client.request import call_options_of, chat_request, check_size, generate_request, tokenize_request
from kvern.client.retry import DEFAULT_RETRY_POLICY, Retries, RetryPolicy, TimeLimit, may_pass
from kvern.v1 import inference_pb2 as pb
from kvern.v1 import router_pb2
from kvern.v1.inference_pb2_grpc import InferenceServiceStub
from kvern.v1.router_pb2_grpc import RouterServiceStub

if TYPE_CHECKING:
    from kvern.v1.inference_pb2_grpc import InferenceServiceAsyncStub
    from kvern.v1.router_pb2_grpc import RouterServiceAsyncStub

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
_Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class AsyncEvents(AsyncIterator[Event]):
    """The events of one generation. The request is sent when the first is asked for.

    Leaving early cancels it: `aclose` does, and the end of an `async with` block. To leave the `async for` loop is
    enough where only the loop holds this object; the event loop then cancels when it runs next. Iteration raises
    KvernError.
    """

    def __init__(self, generator: AsyncGenerator[Event, None]) -> None:
        self._generator = generator

    async def __anext__(self) -> Event:
        return await anext(self._generator)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what has not ended."""
        await self._generator.aclose()


class AsyncClient:
    """As Client, on the event loop that runs where it is made."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        authority: str | None = None,
        api_key: str = "",
        plaintext_api_key: bool = False,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        retry: RetryPolicy = DEFAULT_RETRY_POLICY,
    ) -> None:
        self.address = address
        is_encrypted = credentials is not None
        key = key_metadata(api_key, address, is_encrypted=is_encrypted, plaintext_api_key=plaintext_api_key)
        self._metadata = (*key, *metadata)
        self._policy = retry
        self._channel = open_aio_channel(address, credentials, authority)
        self._inference: InferenceServiceAsyncStub = InferenceServiceStub(self._channel)
        self._router: RouterServiceAsyncStub = RouterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        await self._channel.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> AsyncEvents:
        """Continue a text, or token ids."""
        return self.stream(generate_request(prompt, options), **call_options_of(options))

    def chat(self, messages: Iterable[Mapping[str, object]], **options: Unpack[ChatOptions]) -> AsyncEvents:
        """Answer a conversation: mappings of the fields of ChatMessage, as for Client."""
        return self.stream(chat_request(messages, options), **call_options_of(options))

    def stream(self, request: pb.GenerateRequest, **options: Unpack[CallOptions]) -> AsyncEvents:
        """Run a request as it is."""
        check_size(request)
        return AsyncEvents(self._run(request, **options))

    async def tokenize(self, text: str, *, model: str = "", timeout_s: float | None = None) -> pb.TokenizeResponse:
        """Return the token ids that a text prompt stands for."""
        request = tokenize_request(text, model)
        return await self._unary(self._inference.Tokenize, request, timeout_s)

    async def route(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> pb.RouteResponse:
        """Return which replica `generate` would choose now, and why. Nothing is generated."""
        request = pb.RouteRequest(request=generate_request(prompt, options))
        check_size(request.request)
        return await self._unary(self._inference.Route, request, options.get("timeout_s"))

    async def list_models(self, *, timeout_s: float | None = None) -> pb.ListModelsResponse:
        """Return the models that can be asked for now."""
        return await self._unary(self._inference.ListModels, pb.ListModelsRequest(), timeout_s)

    async def list_replicas(self, *, timeout_s: float | None = None) -> router_pb2.ListReplicasResponse:
        """Return what the router knows of its replicas: state, limits, load."""
        return await self._unary(self._router.ListReplicas, router_pb2.ListReplicasRequest(), timeout_s)

    async def drain_replica(
        self, replica: str, *, undo: bool = False, timeout_s: float | None = None
    ) -> router_pb2.DrainReplicaResponse:
        """Take a replica, by its id or address, out of every router's choice, or back in. What runs there goes on."""
        request = router_pb2.DrainReplicaRequest(replica=replica, undo=undo)
        return await self._unary(self._router.DrainReplica, request, timeout_s)

    async def reset_cache(
        self, *, replica: str = "", model: str = "", timeout_s: float | None = None
    ) -> router_pb2.ResetCacheResponse:
        """Let a replica, or all of a model, forget their cached prompts."""
        target = {"replica": replica} if replica else {"model": model}
        return await self._unary(self._router.ResetCache, router_pb2.ResetCacheRequest(**target), timeout_s)

    async def _run(
        self, request: pb.GenerateRequest, ticket: bytes = b"", **timeouts: Unpack[Timeouts]
    ) -> AsyncGenerator[Event, None]:
        generation = Generation(request, self._policy, **timeouts)
        metadata = (*self._metadata, *ticket_metadata(ticket))
        while not generation.is_finished:
            call = self._inference.Generate(generation.begin_call(), timeout=generation.left_s, metadata=metadata)
            try:
                while (response := await self._read(call, generation)) is not None:
                    event = generation.take(response)
                    if event is not None:
                        yield event
                generation.end_call()
            except grpc.aio.AioRpcError as error:
                failure = self._typed(error, generation)
                await asyncio.sleep(generation.delay_after(failure))
            finally:
                call.cancel()

    async def _read(self, call: _Call, generation: Generation) -> pb.GenerateResponse | None:
        """Return the next response, None at the end."""
        try:
            async with asyncio.timeout(generation.first_token_left_s):
                response = await call.read()
        except TimeoutError:
            raise generation.first_token_timed_out() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # grpc raises this also where the call alone was cancelled: by its server, or as the channel was closed.
            raise KvernError(grpc.StatusCode.CANCELLED, "the call was cancelled") from None
        return response if isinstance(response, pb.GenerateResponse) else None

    def _typed(self, error: grpc.RpcError, generation: Generation) -> KvernError:
        return from_rpc(error, self.address, answered=generation.has_answer, timeout_s=generation.timeout_s)

    async def _unary(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response], request: _Request, timeout_s: float | None
    ) -> _Response:
        retries, limit = Retries(self._policy), TimeLimit(timeout_s)
        while True:
            try:
                return await method(request, timeout=limit.left_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc(error, self.address, timeout_s=timeout_s)
                if not may_pass(failure):
                    raise failure from error
                await asyncio.sleep(retries.delay_after(failure, self._policy.max_retries, limit))
