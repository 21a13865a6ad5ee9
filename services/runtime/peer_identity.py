"""Who is at the other end of a connection, by its certificate."""

from __future__ import annotations

from typing import Any

import grpc

_ALTERNATIVE_NAMES = "x509_subject_alternative_name"
_COMMON_NAME = "x509_common_name"

_Context = grpc.aio.ServicerContext[Any, Any]


def certificate_names(context: _Context) -> frozenset[str]:
    """Return the names in the certificate that a caller has shown and the server has verified: its alternative names
    (DNS, URI, address) and its common name. Empty where there was none.
    """
    return _read(context, _ALTERNATIVE_NAMES, _COMMON_NAME)


def alternative_names(context: _Context) -> frozenset[str]:
    """Return the same without the common name, which authorities may leave to who asks."""
    return _read(context, _ALTERNATIVE_NAMES)


def is_local(context: _Context) -> bool:
    """Whether a call came over a Unix socket: from who may open that, so from the same pod or user."""
    return context.peer().startswith("unix:")


def matches(name: str, identity: str) -> bool:
    """Whether a name is the one meant, or ends as `*.suffix` says."""
    return name == identity or (identity.startswith("*.") and name.endswith(identity[1:]))


def _read(context: _Context, *keys: str) -> frozenset[str]:
    authenticated = context.auth_context()
    return frozenset(value.decode(errors="replace") for key in keys for value in authenticated.get(key, ()))
