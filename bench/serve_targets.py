"""The servers that bench/serve.py drives: Kvern by gRPC, any other by OpenAI's HTTP API.

Both clients share the machine with the server, so both do as little as they can for a token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import grpc.aio

from kvern.services.runtime.channel import open_channel
from kvern.v1 import inference_pb2 as pb
from kvern.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from kvern.v1.inference_pb2_grpc import InferenceServiceAsyncStub


class TargetFailed(Exception):
    """A server did not do what it was asked for. The message says what it did."""


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, and how many tokens to answer, end tokens ignored, each the likeliest."""

    token_ids: Sequence[int]
    new_tokens: int


class Arrival(NamedTuple):
    """Tokens that came together."""

    at: float
    """Of time.perf_counter()."""
    num_tokens: int


@dataclass(frozen=True)
class Answer:
    """What came of one request, and when."""

    sent_at: float
    arrivals: Sequence[Arrival]

    @property
    def num_tokens(self) -> int:
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0].at - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """One a token after the first arrival. Tokens that came together share their gap equally."""
        gaps = list[float]()
        for earlier, arrival in pairwise(self.arrivals):
            gaps += [(arrival.at - earlier.at) / arrival.num_tokens] * arrival.num_tokens
        return gaps


class Target(Protocol):
    """A server that answers requests."""

    async def answer(self, request: Request) -> Answer:
        """Run one request to its end. Raises TargetFailed where it does not bring all its tokens."""


@asynccontextmanager
async def open_target(url: str) -> AsyncIterator[Target]:
    """Connect to grpc://HOST:PORT or http://HOST:PORT. Raises TargetFailed."""
    parts = urlsplit(url)
    if parts.scheme == "grpc":
        async with open_channel(parts.netloc) as channel:
            yield GrpcTarget(channel)
    elif parts.scheme == "http":
        server = HttpServer(parts.hostname or "", parts.port or 80)
        yield HttpTarget(server, await server.get_model())
    else:
        raise TargetFailed(f"{url}: neither grpc:// nor http://")


class GrpcTarget:
    """Kvern's InferenceService."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)

    async def answer(self, request: Request) -> Answer:
        generate = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=request.token_ids),
            sampling=pb.Sampling(temperature=0),
            stopping=pb.Stopping(max_tokens=request.new_tokens, ignore_eos=True),
            output=pb.Output(token_ids=True),
        )
        sent_at, arrivals = time.perf_counter(), list[Arrival]()
        try:
            async for event in self._stub.Generate(generate):
                if num_tokens := len(event.delta.token_ids):
                    arrivals.append(Arrival(time.perf_counter(), num_tokens))
        except grpc.aio.AioRpcError as error:
            raise TargetFailed(f"Generate: {error.code().name}: {error.details()}") from error
        return _checked(Answer(sent_at, arrivals), request)


class HttpTarget:
    """OpenAI's /v1/completions, streamed."""

    def __init__(self, server: HttpServer, model: str) -> None:
        self._server = server
        self._model = model

    async def answer(self, request: Request) -> Answer:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": request.token_ids,
                "max_tokens": request.new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        sent_at, times, num_tokens = time.perf_counter(), list[float](), 0
        try:
            async for chunk in self._server.stream("/v1/completions", body):
                if _holds_token(chunk):
                    times.append(time.perf_counter())
                if usage := chunk.get("usage"):
                    num_tokens = usage["completion_tokens"]
        except asyncio.IncompleteReadError as error:
            raise TargetFailed(f"the connection was closed after {len(times)} chunks") from error
        return _checked(Answer(sent_at, _share(num_tokens, times)), request)


def _holds_token(chunk: dict[str, Any]) -> bool:
    if "error" in chunk:
        raise TargetFailed(f"the stream broke: {chunk['error']}")
    # A token may have no text of its own; a chunk without text that ends the answer has no token, or one such.
    return any(choice["text"] or not choice.get("finish_reason") for choice in chunk["choices"])


def _share(num_tokens: int, times: Sequence[float]) -> list[Arrival]:
    """Divide tokens among chunks, which do not say how many they hold: one, or several where a server is behind."""
    count = len(times)
    return [Arrival(at, (i + 1) * num_tokens // count - i * num_tokens // count) for i, at in enumerate(times)]


def _checked(answer: Answer, request: Request) -> Answer:
    if answer.num_tokens != request.new_tokens:
        raise TargetFailed(f"{answer.num_tokens} tokens came where {request.new_tokens} were asked for")
    return answer


class HttpServer:
    """Sends requests to one server, each on a connection of its own: not all keep them open after a stream."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    async def get_model(self) -> str:
        """Return the name of the model that the server lists first."""
        async with self._response("GET", "/v1/models") as pieces:
            return str(json.loads(b"".join([piece async for piece in pieces]))["data"][0]["id"])

    async def stream(self, path: str, body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Yield a response's server-sent events as they come."""
        rest = b""
        async with self._response("POST", path, body) as pieces:
            async for piece in pieces:
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: {"):
                        yield json.loads(event[6:])

    @asynccontextmanager
    async def _response(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield a response's body, piece by piece. Raises TargetFailed where its status is not 200."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(
                f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            status, headers = await _read_head(reader)
            pieces = _pieces(reader, headers)
            if status != 200:
                raise TargetFailed(f"{method} {path}: status {status}: {b''.join([piece async for piece in pieces])!r}")
            yield pieces
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in headers}


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Yield a body as it was sent: in chunks, or whole where the header says how long it is."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
