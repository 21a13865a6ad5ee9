"""Who may call a replica: its own pod, routers by their certificates, and who has a ticket of a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import structlog

from kvern.services.runtime.errors import PermissionDenied, Unauthenticated
from kvern.services.runtime.health import HEALTH_SERVICE
from kvern.services.runtime.peer_identity import certificate_names, is_local, matches
from kvern.services.runtime.ticket import METADATA_KEY, Ticket, TicketKeys, from_metadata

INFERENCE_SERVICE = "kvern.v1.InferenceService"

_log = structlog.get_logger("kvern.callers")

_Context = grpc.aio.ServicerContext[Any, Any]


class Callers:
    """Everybody may as long as neither routers' identities nor keys of tickets are given."""

    def __init__(self, identities: Sequence[str], tickets: TicketKeys | None) -> None:
        """identities: names in routers' certificates, or *.suffix for all DNS names that end in it."""
        self._identities = identities
        self._tickets = tickets
        if tickets is not None and not identities:
            _log.warning("tickets keep nobody out: without router_identities everybody may call as routers do")

    async def admit(self, method: str, context: _Context) -> None:
        """Raises PermissionDenied."""
        service = method.split("/")[1]
        if not self._identities or service == HEALTH_SERVICE or self._trusts(context):
            return
        if service == INFERENCE_SERVICE and self._tickets is not None:
            return  # `ticket_of` decides
        raise PermissionDenied("only routers may call this, and your certificate has no name of theirs")

    def ticket_of(self, context: _Context) -> Ticket | None:
        """Return the ticket of a call that needs or has one. Raises Unauthenticated."""
        if self._tickets is None:
            return None
        shown = dict(context.invocation_metadata() or ()).get(METADATA_KEY)
        if shown is not None:
            return self._tickets.verify(from_metadata(shown))
        if self._trusts(context):
            return None
        raise Unauthenticated(f"a replica takes requests with a ticket of Route, as metadata {METADATA_KEY}")

    def _trusts(self, context: _Context) -> bool:
        names = certificate_names(context)
        return is_local(context) or any(matches(name, each) for name in names for each in self._identities)
