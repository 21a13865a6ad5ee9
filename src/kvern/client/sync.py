"""The synchronous client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from kvern.client.api_key import key_metadata
from kvern.client.channel import DEFAULT_ADDRESS, open_channel, ticket_metadata
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

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class Events(Iterator[Event]):
    """The events of one generation. The request is sent when the first is asked for.

    Leaving early cancels it: `close` does, and the end of a `with` block. To leave the `for` loop is enough where only
    the loop holds this object. Iteration raises KvernError.
    """

    def __init__(self, generator: Generator[Event]) -> None:
        self._generator = generator

    def __next__(self) -> Event:
        return next(self._generator)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what has not ended."""
        self._generator.close()


class Client:
    """A connection to a Kvern. It connects when first used; close it, or use it as a context manager.

    `address` is what gRPC takes: "host:port", "dns:///name:port", "ipv4:10.0.0.1:50051,10.0.0.2:50051", "unix:/path".
    Calls go in turn to all addresses that a name has. `credentials` switch TLS on:
    `grpc.ssl_channel_credentials(root_certificates)`, and a key and certificate as well where the server asks for them.
    `authority` is the name in the server's certificate, where that is not the one in its address.
    `api_key`, a key or a token, goes with every call; in plain text it goes to this machine only, unless
    `plaintext_api_key` says that the network is safe. `metadata` goes with every call too.

    Every method raises KvernError.
    """

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
        self._channel = open_channel(address, credentials, authority)
        self._inference = InferenceServiceStub(self._channel)
        self._router = RouterServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        self._channel.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Events:
        """Continue a text, or token ids."""
        return self.stream(generate_request(prompt, options), **call_options_of(options))

    def chat(self, messages: Iterable[Mapping[str, object]], **options: Unpack[ChatOptions]) -> Events:
        """Answer a conversation: mappings of the fields of ChatMessage, `role` and `content` above all.

        `content` may be a list of typed parts; `tool_calls` is a list.
        """
        return self.stream(chat_request(messages, options), **call_options_of(options))

    def stream(self, request: pb.GenerateRequest, **options: Unpack[CallOptions]) -> Events:
        """Run a request as it is."""
        check_size(request)
        return Events(self._run(request, **options))

    def tokenize(self, text: str, *, model: str = "", timeout_s: float | None = None) -> pb.TokenizeResponse:
        """Return the token ids that a text prompt stands for."""
        request = tokenize_request(text, model)
        return self._unary(self._inference.Tokenize, request, timeout_s)

    def route(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> pb.RouteResponse:
        """Return which replica `generate` would choose now, and why. Nothing is generated."""
        request = pb.RouteRequest(request=generate_request(prompt, options))
        check_size(request.request)
        return self._unary(self._inference.Route, request, options.get("timeout_s"))

    def list_models(self, *, timeout_s: float | None = None) -> pb.ListModelsResponse:
        """Return the models that can be asked for now."""
        return self._unary(self._inference.ListModels, pb.ListModelsRequest(), timeout_s)

    def list_replicas(self, *, timeout_s: float | None = None) -> router_pb2.ListReplicasResponse:
        """Return what the router knows of its replicas: state, limits, load."""
        return self._unary(self._router.ListReplicas, router_pb2.ListReplicasRequest(), timeout_s)

    def drain_replica(
        self, replica: str, *, undo: bool = False, timeout_s: float | None = None
    ) -> router_pb2.DrainReplicaResponse:
        """Take a replica, by its id or address, out of every router's choice, or back in. What runs there goes on."""
        request = router_pb2.DrainReplicaRequest(replica=replica, undo=undo)
        return self._unary(self._router.DrainReplica, request, timeout_s)

    def reset_cache(
        self, *, replica: str = "", model: str = "", timeout_s: float | None = None
    ) -> router_pb2.ResetCacheResponse:
        """Let a replica, or all of a model, forget their cached prompts."""
        target = {"replica": replica} if replica else {"model": model}
        return self._unary(self._router.ResetCache, router_pb2.ResetCacheRequest(**target), timeout_s)

    def _run(self, request: pb.GenerateRequest, ticket: bytes = b"", **timeouts: Unpack[Timeouts]) -> Generator[Event]:
        generation = Generation(request, self._policy, **timeouts)
        metadata = (*self._metadata, *ticket_metadata(ticket))
        while not generation.is_finished:
            call = self._inference.Generate(generation.begin_call(), timeout=generation.left_s, metadata=metadata)
            alarm = _Alarm(call.cancel, generation.first_token_left_s)
            try:
                for response in call:
                    event = generation.take(response)
                    if generation.first_token_left_s is None:
                        alarm.stop()
                    if event is not None:
                        yield event
                generation.end_call()
            except grpc.RpcError as error:
                failure = generation.first_token_timed_out() if alarm.has_rung else self._typed(error, generation)
                time.sleep(generation.delay_after(failure))
            finally:
                alarm.stop()
                call.cancel()

    def _typed(self, error: grpc.RpcError, generation: Generation) -> KvernError:
        return from_rpc(error, self.address, answered=generation.has_answer, timeout_s=generation.timeout_s)

    def _unary(
        self, method: grpc.UnaryUnaryMultiCallable[_Request, _Response], request: _Request, timeout_s: float | None
    ) -> _Response:
        retries, limit = Retries(self._policy), TimeLimit(timeout_s)
        while True:
            try:
                return method(request, timeout=limit.left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                failure = from_rpc(error, self.address, timeout_s=timeout_s)
                if not may_pass(failure):
                    raise failure from error
                time.sleep(retries.delay_after(failure, self._policy.max_retries, limit))


class _Alarm:
    """Cancels a call after some seconds, unless it is stopped before; with None, never."""

    def __init__(self, cancel: Callable[[], object], after_s: float | None) -> None:
        self.has_rung = False
        self._cancel = cancel
        self._timer = None if after_s is None else threading.Timer(after_s, self._ring)
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self.has_rung = True
        self._cancel()
