"""What a call can end with, other than well."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import grpc
from google.rpc import error_details_pb2, status_pb2

_STATUS_DETAILS_KEY = "grpc-status-details-bin"


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


class TimedOut(KvernError):
    """A time limit passed, the caller's or one that the server set itself."""


def invalid_argument(field: str, message: str) -> KvernError:
    """Return what a server says of such a request, for one that need not be sent to know it."""
    return KvernError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {message}", reason="INVALID_ARGUMENT", field=field)


def first_token_timed_out(timeout_s: float) -> TimedOut:
    return TimedOut(grpc.StatusCode.DEADLINE_EXCEEDED, f"no token within first_token_timeout_s, {timeout_s:g} s")


class _Ended(Protocol):
    """What both kinds of grpc's errors can be asked."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def from_rpc(error: grpc.RpcError, address: str, *, answered: bool = False, timeout_s: float | None) -> KvernError:
    """Return the typed form of grpc's error. `answered`: whether the call brought anything before it failed."""
    # What grpc raises out of a call is the call itself; its stubs know only the base class.
    call = cast(_Ended, error)
    code, message = call.code(), call.details() or ""
    kind = TimedOut if code is grpc.StatusCode.DEADLINE_EXCEEDED else KvernError
    for key, value in call.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY:
            return _with_details(kind(code, message), status_pb2.Status.FromString(cast(bytes, value)))
    if code is grpc.StatusCode.UNAVAILABLE and not answered:
        return Unreachable(code, f"no Kvern at {address}")
    if kind is TimedOut and timeout_s is not None:
        return TimedOut(code, f"not done within timeout_s, {timeout_s:g} s")
    return kind(code, message)


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
