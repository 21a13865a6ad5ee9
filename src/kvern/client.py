"""A synchronous client. It needs no more than the base install.

with Client("127.0.0.1:50051") as client:
    for event in client.chat([{"role": "user", "content": "What is a quern?"}], max_tokens=64):
        print(event.delta.text, end="", flush=True)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack, cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kvern.v1 import inference_pb2 as pb
from kvern.v1 import router_pb2
from kvern.v1.inference_pb2_grpc import InferenceServiceStub
from kvern.v1.router_pb2_grpc import RouterServiceStub

DEFAULT_ADDRESS = "127.0.0.1:50051"

_STATUS_DETAILS_KEY = "grpc-status-details-bin"

_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    # Without these two, a reader that stops still swallows megabytes, and the server cannot know that it stopped.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16384),
    # A server that vanished without a word is noticed while a call waits for it.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.max_receive_message_length", 32 * 1024 * 1024),
    # A generation is no call to repeat behind the caller's back.
    ("grpc.enable_retries", 0),
]


class KvernError(Exception):
    """A call that failed.

    `reason` is the server's name for the cause, for programs; it is empty where no server answered. `field` is the
    request's field at fault, `retry_after_s` when to try again, each if the server named one.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str = "",
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class Unreachable(KvernError):
    """No Kvern answered at the address."""


class GenerateOptions(TypedDict, total=False):
    """How to generate. What is absent is the server's to choose; the meanings are those of GenerateRequest."""

    model: str
    request_id: str
    max_tokens: int
    stop: Iterable[str]
    temperature: float
    top_p: float
    top_k: int
    seed: int


_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)

_STOPPING = ("max_tokens", "stop")
_SAMPLING = ("temperature", "top_p", "top_k", "seed")


class Client:
    """A connection to one Kvern. It connects when first used; close it, or use it as a context manager.

    Every method raises KvernError.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
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

    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Iterator[pb.GenerateResponse]:
        """Continue a text, or token ids. Yields the server's events; leaving the loop cancels the request."""
        request = _request(options)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return self.stream(request)

    def chat(
        self, messages: Iterable[Mapping[str, str]], **options: Unpack[GenerateOptions]
    ) -> Iterator[pb.GenerateResponse]:
        """Answer a conversation: mappings of the fields of ChatMessage, `role` and `content` above all."""
        request = _request(options)
        request.chat.messages.extend(pb.ChatMessage(**message) for message in messages)
        return self.stream(request)

    def stream(self, request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        """Run a request as it is. Yields the server's events; leaving the loop cancels the request."""
        call = self._inference.Generate(request)
        answered = False
        try:
            for response in call:
                answered = True
                yield response
        except grpc.RpcError as error:
            raise self._typed(error, answered=answered) from error
        finally:
            call.cancel()

    def tokenize(self, text: str, *, model: str = "") -> pb.TokenizeResponse:
        """Return the token ids that a text prompt stands for."""
        return self._unary(self._inference.Tokenize, pb.TokenizeRequest(model=model, text=text))

    def list_models(self) -> pb.ListModelsResponse:
        """Return the models that can be asked for now."""
        return self._unary(self._inference.ListModels, pb.ListModelsRequest())

    def list_replicas(self) -> router_pb2.ListReplicasResponse:
        """Return what the router knows of its replicas: state, limits, load."""
        return self._unary(self._router.ListReplicas, router_pb2.ListReplicasRequest())

    def _unary(self, method: grpc.UnaryUnaryMultiCallable[_Request, _Response], request: _Request) -> _Response:
        try:
            return method(request)
        except grpc.RpcError as error:
            raise self._typed(error, answered=False) from error

    def _typed(self, error: grpc.RpcError, *, answered: bool) -> KvernError:
        # What grpc raises out of a call is the call itself; the type stubs know only the base class.
        call = cast(grpc.Call, error)
        code, message = call.code(), call.details() or ""
        for key, value in call.trailing_metadata() or ():
            if key == _STATUS_DETAILS_KEY:
                return _with_details(KvernError(code, message), status_pb2.Status.FromString(cast(bytes, value)))
        if code is grpc.StatusCode.UNAVAILABLE and not answered:
            return Unreachable(code, f"no Kvern at {self.address}")
        return KvernError(code, message)


def _request(options: GenerateOptions) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=options.get("model", ""),
        request_id=options.get("request_id", ""),
        sampling=pb.Sampling(**_chosen(options, _SAMPLING)),
        stopping=pb.Stopping(**_chosen(options, _STOPPING)),
    )


def _chosen(options: GenerateOptions, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def _with_details(error: KvernError, status: status_pb2.Status) -> KvernError:
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            error.reason = info.reason
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            error.field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            error.retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return error
