"""Who is at the other end of a connection, by its certificate."""

from __future__ import annotations

from typing import Any

import grpc

_NAMES = ("x509_subject_alternative_name", "x509_common_name")


def certificate_names(context: grpc.aio.ServicerContext[Any, Any]) -> frozenset[str]:
    """Return the names in the certificate that a caller has shown and the server has verified: its alternative names
    (DNS, URI, address) and its common name. Empty where there was none.
    """
    authenticated = context.auth_context()
    return frozenset(value.decode(errors="replace") for key in _NAMES for value in authenticated.get(key, ()))
