"""Errors in OpenAI's form, and how gRPC statuses become them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from starlette.responses import JSONResponse

from kvern.services.runtime.interceptors import STATUS_DETAILS_KEY

_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

_CODES = {
    "INVALID_ARGUMENT": "invalid_value",
    "UNSUPPORTED": "unsupported_parameter",
    "RESOURCE_EXHAUSTED": "rate_limit_exceeded",
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
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self._type, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)

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
    return ApiError(_HTTP_STATUS.get(error.code(), 500), message, param, code, details.headers)


class _Details:
    """The google.rpc details of a status, empty where it has none."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.reason = ""
        self.field = ""
        self.headers: dict[str, str] = {}
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
