"""One table from typed errors to gRPC statuses, applied to every call of every service."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kvern.services.runtime import errors

STATUS_DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "kvern"

MAX_VERDICT_S = 60.0
"""How long a call that was ended from outside waits until its reader takes the status, in seconds."""

_ROUNDING_S = 0.02
"""Of deadlines below a second, and what a cancellation takes to be noticed."""

_STATUS: dict[type[errors.ServiceError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Internal: grpc.StatusCode.INTERNAL,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
}

_log = structlog.get_logger("kvern.rpc")


def _details(error: errors.ServiceError) -> list[Message]:
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)]
    if isinstance(error, errors.InvalidArgument | errors.Unsupported):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.ResourceExhausted):
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def status_of(error: errors.ServiceError) -> tuple[grpc.StatusCode, bytes]:
    """Return the status code of an error and its serialized google.rpc.Status."""
    code = _STATUS[type(error)]
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=error.message)
    for detail in _details(error):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return code, status.SerializeToString()


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the status that an exception which ended a call's work stands for."""
    if isinstance(error, errors.ServiceError):
        return _STATUS[type(error)]
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code()
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        # The client's going away and its deadline look the same from here.
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.INTERNAL


def code_of_cancelled(remaining_s: float | None, elapsed_s: float) -> grpc.StatusCode:
    """Return the status of a call that was cancelled: by its client, or because its deadline has passed.

    remaining_s: until the deadline as the server knows it, which is later than the client's by a hundredth of the whole
    at most, since gRPC rounds what it sends.
    """
    has_passed = remaining_s is not None and remaining_s < 0.01 * elapsed_s + _ROUNDING_S
    return grpc.StatusCode.DEADLINE_EXCEEDED if has_passed else grpc.StatusCode.CANCELLED


def code_of_ended(error: BaseException, remaining_s: float | None, elapsed_s: float) -> grpc.StatusCode:
    """Return the status of a call that an exception ended; of a cancelled one, by whether its deadline has passed."""
    code = code_of(error)
    return code_of_cancelled(remaining_s, elapsed_s) if code is grpc.StatusCode.CANCELLED else code


def reason_of(error: BaseException) -> str:
    """Return ErrorInfo.reason of the status that an exception stands for, empty where it has none."""
    if isinstance(error, errors.ServiceError):
        return error.reason
    if not isinstance(error, grpc.aio.AioRpcError):
        return ""
    packed = dict(error.trailing_metadata() or ()).get(STATUS_DETAILS_KEY, b"")
    info = error_details_pb2.ErrorInfo()
    details = status_pb2.Status.FromString(packed if isinstance(packed, bytes) else b"").details
    return info.reason if any(detail.Unpack(info) for detail in details) else ""


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> NoReturn:
    # What the handler has set so far stays: abort would replace it.
    metadata = tuple(context.trailing_metadata() or ())
    if isinstance(error, errors.ServiceError):
        code, details = status_of(error)
        await context.abort(code, error.message, (*metadata, (STATUS_DETAILS_KEY, details)))
    if isinstance(error, grpc.aio.AioRpcError):
        # Another service's verdict, passed on with its details.
        details_of = [item for item in error.trailing_metadata() or () if item[0] == STATUS_DETAILS_KEY]
        await context.abort(error.code(), error.details() or "", (*metadata, *details_of))
    if isinstance(error, NotImplementedError):
        # What generated code raises where a servicer leaves a method out, as the health library's does.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented", metadata)
    _log.error("call failed", method=method, exc_info=error)
    await context.abort(
        grpc.StatusCode.INTERNAL, f"{type(error).__name__} in {method}; the service's log has more", metadata
    )
    raise AssertionError("abort returned")


def _ours(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether this CancelledError is the call's own end, rather than one that leaked out of something it awaited."""
    task = asyncio.current_task()
    return context.cancelled() or (task is not None and task.cancelling() > 0)


def end_call(call: asyncio.Task[Any], error: errors.ServiceError) -> None:
    """End a call from outside its handler, which may be stuck in a write to a reader that does not read."""
    call.cancel(error)


def verdict_in(error: BaseException) -> errors.ServiceError | None:
    """Return what `end_call` was given, if it was that."""
    verdict = error.args[0] if isinstance(error, asyncio.CancelledError) and error.args else None
    return verdict if isinstance(verdict, errors.ServiceError) else None


async def _abort_from_outside(
    context: grpc.aio.ServicerContext[Any, Any], error: errors.ServiceError, method: str
) -> None:
    """Tell the reader why its call ends, if it comes to read it."""
    if (task := asyncio.current_task()) is not None:
        task.uncancel()
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_VERDICT_S):
            await _abort(context, error, method)


Behavior = Callable[[Any, Any], Awaitable[Any]]
"""What serves a call, from request and context: a coroutine, as all are that ErrorInterceptor has made."""


def wrap(handler: Any, around: Callable[[Behavior], Behavior]) -> Any:
    """Return a handler with its behavior in another one."""
    for kind in ("unary_unary", "unary_stream", "stream_stream"):
        if (behavior := getattr(handler, kind)) is not None:
            return handler._replace(**{kind: around(behavior)})
    return handler


def code_at_end(
    context: grpc.aio.ServicerContext[Any, Any], *, has_returned: bool, elapsed_s: float
) -> grpc.StatusCode:
    """Return the status of a call whose behavior has ended."""
    told = context.code()
    if isinstance(told, grpc.StatusCode) and told is not grpc.StatusCode.OK:
        return told
    return grpc.StatusCode.OK if has_returned else code_of_cancelled(context.time_remaining(), elapsed_s)


Admit = Callable[[str, grpc.aio.ServicerContext[Any, Any]], Awaitable[None]]
"""Decides whether a call of a method, /package.Service/Method, may go on. Raises Unauthenticated or PermissionDenied.
It runs in the call's own task, so the context variables it sets are the handler's to read."""


async def admit_all(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Let everybody call everything."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status. Cancellation passes through untouched.

    admit: is asked before each call is handled; what it raises becomes a status likewise.
    """

    def __init__(self, admit: Admit = admit_all) -> None:
        self._admit = admit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call = _Call(str(handler_call_details.method), handler, self._admit)
        # Requests come as bytes, for what gRPC says of those it cannot decode is INTERNAL, as if it were our fault.
        codecs = {"request_deserializer": None, "response_serializer": handler.response_serializer}
        if not handler.response_streaming:
            return grpc.unary_unary_rpc_method_handler(_guard_unary(handler.unary_unary, call), **codecs)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(_guard_stream(handler.stream_stream, call), **codecs)
        return grpc.unary_stream_rpc_method_handler(_guard_stream(handler.unary_stream, call), **codecs)


class _Call:
    """What comes before a method's handler is called."""

    def __init__(self, method: str, handler: Any, admit: Admit) -> None:
        self.method = method
        self._deserialize = handler.request_deserializer or bytes
        self._streams_requests = handler.request_streaming
        self._admit = admit

    async def admit(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Return the request, or the requests, as the handler wants them. Raises InvalidArgument and what
        `Admit` does.
        """
        await self._admit(self.method, context)
        return self._decode_each(request) if self._streams_requests else self._decode(request)

    async def _decode_each(self, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for request in requests:
            yield self._decode(request)

    def _decode(self, request: bytes) -> Any:
        try:
            return self._deserialize(request)
        except DecodeError as error:
            raise errors.InvalidArgument(
                "request", f"{len(request)} bytes that are not this method's message"
            ) from error


def _guard_unary(behavior: Callable[[Any, Any], Awaitable[Any]], call: _Call) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(await call.admit(request, context), context)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            if _ours(context):
                raise
            await _abort(context, errors.Unavailable("a call this one needs was cancelled"), call.method)
        except Exception as error:
            await _abort(context, error, call.method)

    return guarded


def _guard_stream(behavior: Callable[[Any, Any], Any], call: _Call) -> Callable[[Any, Any], Awaitable[None]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            responses = behavior(await call.admit(request, context), context)
            if inspect.iscoroutine(responses):
                await responses  # it writes through the context, as the health service does
                return
            # Written here rather than yielded: a call that ends during a write would leave the handler's generator
            # suspended, and its `finally` would run only when the garbage collector finds it.
            async with aclosing(responses):
                async for response in responses:
                    await context.write(response)
        except (grpc.aio.AbortError, grpc.aio.InternalError):
            raise  # ended by us, or a write that found the client gone: grpc knows both
        except asyncio.CancelledError as cancelled:
            if (verdict := verdict_in(cancelled)) is not None:
                await _abort_from_outside(context, verdict, call.method)
                raise
            if _ours(context):
                raise
            await _abort(context, errors.Unavailable("a call this one needs was cancelled"), call.method)
        except Exception as error:
            await _abort(context, error, call.method)

    return guarded
