"""Errors in OpenAI's form, and how gRPC statuses become them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from starlette.responses import Response

from kvern.services.gateway.answers import ErrorAnswer, ErrorDetail
from kvern.services.runtime.interceptors import STATUS_DETAILS_KEY

_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

_CODES = {
    "INVALID_ARGUMENT": "invalid_value",
    "UNSUPPORTED": "unsupported_parameter",
    "RESOURCE_EXHAUSTED": "rate_limit_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
}
"""ErrorInfo.reason to OpenAI's code, where it is not the same in small letters."""


@dataclass(eq=False)
class ApiError(Exception):
    """What an HTTP client is told when its request fails."""

    status: int
    message: str
    param: str | None = None
    """The request's field at fault, as OpenAI names it."""
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> ErrorAnswer:
        return ErrorAnswer(error=ErrorDetail(message=self.message, type=self._type, param=self.param, code=self.code))

    @property
    def response(self) -> Response:
        response = self.body.to_response()
        response.status_code = self.status
        response.headers.update(self.headers)
        return response

    @property
    def _type(self) -> str:
        if self.status >= 500:
            return "server_error"
        return "rate_limit_error" if self.status == 429 else "invalid_request_error"


def from_rpc(error: grpc.aio.AioRpcError, param_of: Callable[[str], str | None]) -> ApiError:
    """Convert a status of the router. `param_of` names a GenerateRequest's field as the HTTP client knows it."""
    details = _Details(error)
    message = error.details() or error.code().name
    param = "model" if details.reason == "MODEL_NOT_FOUND" else None
    if details.field:
        param = param_of(details.field)
        message = message.replace(f"{details.field}: ", f"{param}: ", 1)
    if error.code() is grpc.StatusCode.UNAVAILABLE and not details.reason:
        message = "the router is away"  # what gRPC says of the connection is of no use to a client
    code = _CODES.get(details.reason, details.reason.lower()) or None
    return ApiError(_status(error.code(), details), message, param, code, details.headers)


def _status(code: grpc.StatusCode, details: _Details) -> int:
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not details.reason:
        return 413  # gRPC itself says so of a message that is too long
    return _HTTP_STATUS.get(code, 500)


class _Details:
    """The google.rpc details of a status, empty where it has none."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.reason = ""
        self.field = ""
        self.headers: dict[str, str] = {}
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            self.headers["WWW-Authenticate"] = "Bearer"
        trailing = dict(error.trailing_metadata() or ())
        packed = trailing.get(STATUS_DETAILS_KEY, b"")
        for detail in status_pb2.Status.FromString(packed).details:
            self._read(detail)

    def _read(self, detail: AnyMessage) -> None:
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            self.reason = info.reason
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            self.field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            self.headers = {"Retry-After": str(max(1, math.ceil(retry.retry_delay.ToMilliseconds() / 1000)))}
