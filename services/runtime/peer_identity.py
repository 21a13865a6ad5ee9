"""Who is at the other end of a connection, by its certificate."""

from __future__ import annotations

import re
from typing import Any

import grpc

_ALTERNATIVE_NAMES = "x509_subject_alternative_name"

_DNS_LABELS = re.compile(r"[A-Za-z0-9_.-]+")

_Context = grpc.aio.ServicerContext[Any, Any]


def certificate_names(context: _Context) -> frozenset[str]:
    """Return the alternative names (DNS, URI, address) in the certificate that a caller has shown and the server has
    verified; empty where there was none. Its common name is none of them: authorities may leave that to who asks.
    """
    values = context.auth_context().get(_ALTERNATIVE_NAMES, ())
    return frozenset(value.decode(errors="replace") for value in values)


def is_local(context: _Context) -> bool:
    """Whether a call came over a Unix socket: from who may open that, so from the same pod or user."""
    return context.peer().startswith("unix:")


def matches(name: str, identity: str) -> bool:
    """Whether a name is the one meant, or a DNS name that ends as `*.suffix` says: URIs and mail addresses may have
    ends that their owners choose.
    """
    if not identity.startswith("*."):
        return name == identity
    return name.endswith(identity[1:]) and _DNS_LABELS.fullmatch(name) is not None
