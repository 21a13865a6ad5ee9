"""A server that does what a test tells it: real sockets, no model. It runs on threads, beside either client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from kvern.services.runtime.channel import SERVER_OPTIONS
from kvern.services.runtime.errors import ServiceError
from kvern.services.runtime.interceptors import STATUS_DETAILS_KEY, status_of
from kvern.v1 import inference_pb2 as pb
from kvern.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server

SEED = 2**63 + 7

Behaviour = Callable[[threading.Event], Iterator[pb.GenerateResponse]]
"""Given what is set when its call has ended."""


def started(seed: int = SEED, request_id: str = "r1") -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.Started(request_id=request_id, model="tiny", prompt_tokens=7, seed=seed))


def scheduled(cached_tokens: int = 4, queue_s: float = 0.5) -> pb.GenerateResponse:
    return pb.GenerateResponse(scheduled=pb.Scheduled(cached_tokens=cached_tokens, queue_s=queue_s))


def delta(text: str, *token_ids: int, index: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(index=index, text=text, token_ids=token_ids))


def finished(index: int = 0, cached_tokens: int = 4, **timing: float) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        finished=pb.Finished(
            index=index,
            reason=pb.FINISH_REASON_STOP,
            usage=pb.Usage(prompt_tokens=7, cached_tokens=cached_tokens, completion_tokens=3),
            timing=pb.Timing(**timing),
        )
    )


def responds(*script: pb.GenerateResponse | ServiceError) -> Behaviour:
    """Send messages, up to an error if there is one."""

    def behaviour(ended: threading.Event) -> Iterator[pb.GenerateResponse]:
        for step in script:
            if isinstance(step, ServiceError):
                raise step
            yield step

    return behaviour


def stalls_after(*script: pb.GenerateResponse) -> Behaviour:
    """Send messages and then nothing, until the call ends."""

    def behaviour(ended: threading.Event) -> Iterator[pb.GenerateResponse]:
        yield from script
        ended.wait()

    return behaviour


def _call_at_end(context: grpc.ServicerContext, callback: Callable[[], None]) -> None:
    """Call back when a call has ended; at once where that was before its handler began."""
    if not context.add_callback(callback):
        callback()


class ScriptedServer(InferenceServiceServicer):
    """Each call takes the next behaviour; the last one stays."""

    def __init__(
        self,
        *behaviours: Behaviour,
        address: str = "127.0.0.1:0",
        credentials: grpc.ServerCredentials | None = None,
        options: Sequence[tuple[str, int | str]] = SERVER_OPTIONS,
    ) -> None:
        self._behaviours = list(behaviours)
        self.received: list[pb.GenerateRequest] = []
        self.metadata: dict[str, str | bytes] = {}
        """Of the last call."""
        self.time_remaining_s: float | None = None
        """Of the last call, when it came."""
        self.ended = threading.Event()
        """Set when a Generate call has ended, in whatever way."""
        self.num_failures = 0
        """Further Tokenize calls that find no tokenizer."""
        self.stalls = False
        """Whether Tokenize stays silent."""
        self._server = grpc.server(ThreadPoolExecutor(8), options=options)
        add_InferenceServiceServicer_to_server(self, self._server)
        host = address.rpartition(":")[0]
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        self.address = f"{host}:{port}"

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.received.append(request)
        self.metadata = dict(context.invocation_metadata())
        self.time_remaining_s = context.time_remaining()
        behaviour = self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]
        ended = threading.Event()
        _call_at_end(context, ended.set)
        _call_at_end(context, self.ended.set)
        try:
            yield from behaviour(ended)
        except ServiceError as error:
            code, details = status_of(error)
            context.set_trailing_metadata(((STATUS_DETAILS_KEY, details),))
            context.abort(code, error.message)

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        """One token a byte."""
        self.metadata = dict(context.invocation_metadata())
        if self.stalls:
            ended = threading.Event()
            _call_at_end(context, ended.set)
            ended.wait()
        if self.num_failures:
            self.num_failures -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        return pb.TokenizeResponse(ids=request.text.encode())
