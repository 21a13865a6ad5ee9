"""Typed errors that servicers raise. `interceptors` maps each to a gRPC status with google.rpc details."""

from __future__ import annotations


class ServiceError(Exception):
    """Base of all errors that end a call on purpose.

    `reason` is ErrorInfo.reason: upper-case, stable, for programs; the message is for people.
    """

    reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason


class InvalidArgument(ServiceError):
    """The request breaks a rule. `field` is its dotted name in the request."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Unsupported(ServiceError):
    """The request asks for what this server does not do. `field` is its dotted name in the request."""

    reason = "UNSUPPORTED"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Unauthenticated(ServiceError):
    """Who calls is not known: credentials are missing, wrong or out of date."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(ServiceError):
    """Who calls is known, and may not do this."""

    reason = "PERMISSION_DENIED"


class NotFound(ServiceError):
    """The thing asked for does not exist here, say a model."""

    reason = "NOT_FOUND"


class AlreadyExists(ServiceError):
    """The name is taken, say a request id in flight."""

    reason = "ALREADY_EXISTS"


class ResourceExhausted(ServiceError):
    """A bound is reached. `retry_after_s`: when to try again, in seconds."""

    reason = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class Unavailable(ServiceError):
    """A part that the call needs is away; the same call may succeed later or elsewhere."""

    reason = "UNAVAILABLE"


class Internal(ServiceError):
    """A fault of ours that is known by name."""


class Cancelled(ServiceError):
    """The call was called off, by another call of its client."""

    reason = "CANCELLED"
