"""What handlers raise, as clients see it over a real connection."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import structlog
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvern.services.runtime import errors
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.interceptors import Admit, ErrorInterceptor, admit_all
from kvern.v1 import engine_pb2, engine_pb2_grpc, replica_pb2, replica_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from tests.for_ever import for_ever

Unary = Callable[[], Awaitable[None]]
TIMEOUT_S = 10.0
SECRET = "the secret of /etc/somewhere"


class Peer(
    tokenizer_pb2_grpc.TokenizerServiceServicer,
    replica_pb2_grpc.ReplicaServiceServicer,
    engine_pb2_grpc.EngineServiceServicer,
):
    """A handler of each kind that does what the test says."""

    def __init__(self) -> None:
        self.behave: Unary = for_ever
        self.generators: list[AsyncIterator[replica_pb2.ServeResponse]] = []
        self.entered = asyncio.Event()
        self.ended = asyncio.Event()
        self.admit: Admit = admit_all

    async def GetTokenizerInfo(
        self, request: tokenizer_pb2.GetTokenizerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tokenizer_pb2.GetTokenizerInfoResponse:
        self.entered.set()
        await self.behave()
        return tokenizer_pb2.GetTokenizerInfoResponse()

    def Serve(
        self, request: replica_pb2.ServeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[replica_pb2.ServeResponse]:
        # Kept, so that no garbage collector ends it for us.
        self.generators.append(self._serve())
        return self.generators[-1]

    async def _serve(self) -> AsyncIterator[replica_pb2.ServeResponse]:
        try:
            yield replica_pb2.ServeResponse(client_frame=b"x")
            self.entered.set()
            await self.behave()
            while True:
                yield replica_pb2.ServeResponse(client_frame=b"x" * 100_000)
        finally:
            self.ended.set()

    async def Connect(
        self, request_iterator: AsyncIterator[engine_pb2.ConnectRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.ConnectResponse]:
        async for command in request_iterator:
            yield engine_pb2.ConnectResponse(step=engine_pb2.StepOutput(ids=[command.abort.id]))
        await self.behave()


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest_asyncio.fixture
async def channel(peer: Peer, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    async def admit(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await peer.admit(method, context)

    server = grpc.aio.server(interceptors=[ErrorInterceptor(admit)])
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(peer, server)
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(peer, server)
    engine_pb2_grpc.add_EngineServiceServicer_to_server(peer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    server.add_insecure_port(f"unix:{tmp_path}/s.sock")
    await server.start()
    try:
        async with open_channel(f"unix:{tmp_path}/s.sock") as channel:
            yield channel
    finally:
        await server.stop(0)


def failing_with(error: BaseException) -> Unary:
    async def fail() -> None:
        raise error

    return fail


async def unary(channel: grpc.aio.Channel) -> None:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    await stub.GetTokenizerInfo(tokenizer_pb2.GetTokenizerInfoRequest(), timeout=TIMEOUT_S)


async def streamed(channel: grpc.aio.Channel) -> None:
    stub = replica_pb2_grpc.ReplicaServiceStub(channel)
    async for _ in stub.Serve(replica_pb2.ServeRequest(), timeout=TIMEOUT_S):
        pass


async def both_ways(channel: grpc.aio.Channel) -> None:
    async def commands() -> AsyncIterator[engine_pb2.ConnectRequest]:
        yield engine_pb2.ConnectRequest(abort=engine_pb2.AbortRequest(id=7))

    async for response in engine_pb2_grpc.EngineServiceStub(channel).Connect(commands(), timeout=TIMEOUT_S):
        assert list(response.step.ids) == [7]


KINDS = pytest.mark.parametrize("call", [unary, streamed, both_ways])


async def failure(call: Awaitable[None]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


def details_of(error: grpc.aio.AioRpcError) -> tuple[int, list[Message]]:
    """Return the code in google.rpc.Status and its details."""
    trailing = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    found: list[Message] = []
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            message = kind()
            if packed.Unpack(message):
                found.append(message)
    return status.code, found


@KINDS
@pytest.mark.parametrize(
    ("error", "code", "message", "reason"),
    [
        (errors.InvalidArgument("a.b", "is odd"), "INVALID_ARGUMENT", "a.b: is odd", "INVALID_ARGUMENT"),
        (errors.Unsupported("a.b", "not yet"), "UNIMPLEMENTED", "a.b: not yet", "UNSUPPORTED"),
        (errors.Unauthenticated("who?"), "UNAUTHENTICATED", "who?", "UNAUTHENTICATED"),
        (errors.PermissionDenied("not you"), "PERMISSION_DENIED", "not you", "PERMISSION_DENIED"),
        (errors.NotFound("no such model"), "NOT_FOUND", "no such model", "NOT_FOUND"),
        (errors.AlreadyExists("in use"), "ALREADY_EXISTS", "in use", "ALREADY_EXISTS"),
        (errors.ResourceExhausted("full", retry_after_s=1.5), "RESOURCE_EXHAUSTED", "full", "RESOURCE_EXHAUSTED"),
        (errors.Unavailable("away"), "UNAVAILABLE", "away", "UNAVAILABLE"),
        (errors.Internal("odd", reason="POISON"), "INTERNAL", "odd", "POISON"),
        (errors.Cancelled("aborted"), "CANCELLED", "aborted", "CANCELLED"),
    ],
)
async def test_typed_error_becomes_its_status_with_details(
    channel: grpc.aio.Channel,
    peer: Peer,
    call: Callable[[grpc.aio.Channel], Awaitable[None]],
    error: errors.ServiceError,
    code: str,
    message: str,
    reason: str,
) -> None:
    peer.behave = failing_with(error)
    failed = await failure(call(channel))
    assert (failed.code().name, failed.details()) == (code, message)
    status_code, details = details_of(failed)
    assert status_code == code_pb2.Code.Value(code)
    assert details[0] == error_details_pb2.ErrorInfo(reason=reason, domain="kvern")


@KINDS
async def test_call_that_is_not_admitted_never_reaches_its_handler(
    channel: grpc.aio.Channel, peer: Peer, call: Callable[[grpc.aio.Channel], Awaitable[None]]
) -> None:
    asked = []

    async def refuse(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        asked.append(method)
        raise errors.PermissionDenied("not you")

    peer.admit, peer.behave = refuse, failing_with(AssertionError("it was handled"))
    failed = await failure(call(channel))
    assert (failed.code().name, failed.details()) == ("PERMISSION_DENIED", "not you")
    assert asked[0].startswith("/kvern.v1.")


@KINDS
async def test_what_admission_finds_out_is_the_handlers_to_read(
    channel: grpc.aio.Channel, peer: Peer, call: Callable[[grpc.aio.Channel], Awaitable[None]]
) -> None:
    caller = contextvars.ContextVar("caller", default="nobody")

    async def know(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        caller.set("somebody")

    async def tell() -> None:
        raise errors.NotFound(caller.get())

    peer.admit, peer.behave = know, tell
    assert (await failure(call(channel))).details() == "somebody"


@pytest.mark.parametrize("request_bytes", [b"\xff", b"\x0a\x01\xff"], ids=["not a message", "not UTF-8"])
async def test_request_that_is_no_message_is_an_invalid_argument(
    channel: grpc.aio.Channel, peer: Peer, request_bytes: bytes
) -> None:
    service = "/kvern.v1.TokenizerService"
    call = channel.unary_unary(f"{service}/EncodePrompt")(request_bytes, timeout=TIMEOUT_S)
    failed = await failure(call)
    assert (failed.code().name, failed.details()) == (
        "INVALID_ARGUMENT",
        f"request: {len(request_bytes)} bytes that are not this method's message",
    )


async def test_method_that_a_servicer_leaves_out_is_unimplemented(channel: grpc.aio.Channel) -> None:
    listing = health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest(), timeout=TIMEOUT_S)
    failed = await failure(listing)
    assert failed.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_stream_with_something_that_is_no_message_ends_as_an_invalid_argument(
    channel: grpc.aio.Channel, peer: Peer
) -> None:
    async def commands() -> AsyncIterator[bytes]:
        yield engine_pb2.ConnectRequest(abort=engine_pb2.AbortRequest(id=7)).SerializeToString()
        yield b"\xff"

    call = channel.stream_stream("/kvern.v1.EngineService/Connect")(commands(), timeout=TIMEOUT_S)
    assert engine_pb2.ConnectResponse.FromString(await anext(aiter(call))).step.ids == [7]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await anext(aiter(call))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_field_at_fault_and_retry_delay_are_in_the_details(channel: grpc.aio.Channel, peer: Peer) -> None:
    peer.behave = failing_with(errors.InvalidArgument("a.b", "is odd"))
    _, details = details_of(await failure(unary(channel)))
    violation = error_details_pb2.BadRequest.FieldViolation(field="a.b", description="a.b: is odd")
    assert error_details_pb2.BadRequest(field_violations=[violation]) in details
    peer.behave = failing_with(errors.ResourceExhausted("full", retry_after_s=1.5))
    _, details = details_of(await failure(unary(channel)))
    [retry] = [detail for detail in details if isinstance(detail, error_details_pb2.RetryInfo)]
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (1, 500_000_000)


def test_every_typed_error_has_a_status() -> None:
    from kvern.services.runtime.interceptors import _STATUS

    assert set(errors.ServiceError.__subclasses__()) == set(_STATUS)


@KINDS
async def test_verdict_of_another_service_is_passed_on_with_its_details(
    channel: grpc.aio.Channel, peer: Peer, call: Callable[[grpc.aio.Channel], Awaitable[None]]
) -> None:
    peer.behave = failing_with(errors.InvalidArgument("a.b", "is odd"))
    first = await failure(unary(channel))
    peer.behave = failing_with(first)
    passed_on = await failure(call(channel))
    assert (passed_on.code(), passed_on.details()) == (first.code(), first.details())
    assert details_of(passed_on) == details_of(first)


@KINDS
async def test_error_nobody_foresaw_is_internal_and_keeps_its_text_to_itself(
    channel: grpc.aio.Channel, peer: Peer, call: Callable[[grpc.aio.Channel], Awaitable[None]]
) -> None:
    peer.behave = failing_with(RuntimeError(SECRET))
    failed = await failure(call(channel))
    assert failed.code() is grpc.StatusCode.INTERNAL
    assert "RuntimeError" in (failed.details() or "")
    assert SECRET not in repr(failed)


@KINDS
async def test_cancellation_that_leaks_out_of_something_awaited_is_a_status(
    channel: grpc.aio.Channel, peer: Peer, call: Callable[[grpc.aio.Channel], Awaitable[None]]
) -> None:
    """E06."""
    peer.behave = failing_with(asyncio.CancelledError())
    assert (await failure(call(channel))).code() is grpc.StatusCode.UNAVAILABLE


async def test_cancelled_call_reaches_the_handler_as_its_own_cancellation(
    channel: grpc.aio.Channel, peer: Peer
) -> None:
    stub = replica_pb2_grpc.ReplicaServiceStub(channel)
    call = stub.Serve(replica_pb2.ServeRequest(), timeout=TIMEOUT_S)
    await call.read()
    await peer.entered.wait()
    call.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        await peer.ended.wait()


async def test_call_cancelled_while_a_message_is_written_ends_its_handler_without_an_error(
    channel: grpc.aio.Channel, peer: Peer
) -> None:
    """E01: the handler is suspended in `yield` then, and nobody but the interceptor will resume it."""
    peer.behave = do_nothing
    stub = replica_pb2_grpc.ReplicaServiceStub(channel)
    with structlog.testing.capture_logs() as logs:
        call = stub.Serve(replica_pb2.ServeRequest(), timeout=TIMEOUT_S)
        await call.read()
        await peer.entered.wait()
        call.cancel()
        async with asyncio.timeout(TIMEOUT_S):
            await peer.ended.wait()
    assert logs == []


async def do_nothing() -> None:
    return


async def test_handler_that_writes_through_its_context_works(channel: grpc.aio.Channel) -> None:
    """The health service's Watch is one."""
    call = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service="unheard-of"), timeout=TIMEOUT_S
    )
    response = await call.read()
    assert response.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    call.cancel()


async def test_deadline_that_passes_is_deadline_exceeded(channel: grpc.aio.Channel, peer: Peer) -> None:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.GetTokenizerInfo(tokenizer_pb2.GetTokenizerInfoRequest(), timeout=0.05)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
