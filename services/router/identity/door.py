"""Decides, before a call is handled, who makes it and whether they may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc
import structlog
from prometheus_client import CollectorRegistry, Counter

from kvern.services.router.audit import log_refused
from kvern.services.router.identity.authenticator import Authenticator
from kvern.services.router.identity.caller import Caller, Role, set_caller
from kvern.services.router.identity.permissions import role_for
from kvern.services.router.identity.rejection import Cause, Rejected
from kvern.services.router.identity.tenants import Tenants
from kvern.services.runtime.errors import PermissionDenied, Unauthenticated
from kvern.services.runtime.reloaded_file import ReloadedFile

_REFUSAL = "the credentials are missing or not valid"

_log = structlog.get_logger("kvern.request")


def count_failures(registry: CollectorRegistry) -> dict[Cause, Counter]:
    """Return what counts calls that are refused because who makes them is not known."""
    failures = Counter(
        "kvern_router_unauthenticated",
        "Calls refused because who makes them is not known, by what was wrong with their credentials.",
        ["cause"],
        registry=registry,
    )
    return {cause: failures.labels(cause.value) for cause in Cause}


class Door:
    """Admits calls: give `admit` to the server."""

    def __init__(
        self, authenticator: Authenticator, tenants: ReloadedFile[Tenants] | None, failures: Mapping[Cause, Counter]
    ) -> None:
        """failures: of credentials, by what was wrong."""
        self._authenticator = authenticator
        self._tenants = tenants
        self._failures = failures

    async def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises Unauthenticated, PermissionDenied, Unavailable where it cannot be known who calls."""
        role = role_for(method)
        if role is None:
            return
        try:
            caller = await self._authenticator.identify(context)
        except Rejected as rejected:
            self._failures[rejected.cause].inc()
            _log.info("call refused", method=method, cause=rejected.cause.value)
            # The cause is for us: with one text for all, whoever tries credentials learns nothing.
            raise Unauthenticated(_REFUSAL) from None
        set_caller(caller)
        try:
            set_caller(self._permitted(caller, role))
        except PermissionDenied as error:
            if role is Role.ADMIN:
                log_refused(method)
            else:
                _log.info("call refused", method=method, cause=error.reason, caller=caller.id, tenant=caller.tenant)
            raise

    def _permitted(self, caller: Caller, role: Role) -> Caller:
        if not caller.has(role):
            raise PermissionDenied(f"this needs the role {role.value}")
        return caller if self._tenants is None else replace(caller, policy=self._tenants.value.policy_of(caller.tenant))
