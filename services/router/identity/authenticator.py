"""Tells who calls, by what they show: an API key, a token, or the certificate of their connection."""

from __future__ import annotations

from typing import Any

import grpc

from kvern.services.router.identity.api_keys import ApiKeys
from kvern.services.router.identity.caller import Caller
from kvern.services.router.identity.jwt_tokens import JwtTokens, is_token
from kvern.services.router.identity.rejection import Cause, Rejected
from kvern.services.router.identity.tenants import Tenants
from kvern.services.runtime.peer_identity import certificate_names
from kvern.services.runtime.reloaded_file import ReloadedFile

AUTHORIZATION = "authorization"

_SCHEME = "bearer "

_Context = grpc.aio.ServicerContext[Any, Any]


class Authenticator:
    """Asks each source that there is. What stands in the authorization counts before a certificate: a gateway forwards
    its clients' over a connection of its own.
    """

    def __init__(
        self,
        keys: ReloadedFile[ApiKeys] | None = None,
        tokens: JwtTokens | None = None,
        tenants: ReloadedFile[Tenants] | None = None,
    ) -> None:
        self._keys = keys
        self._tokens = tokens
        self._tenants = tenants

    async def identify(self, context: _Context) -> Caller:
        """Return who calls. Raises Rejected, Unavailable where that cannot be known now."""
        given = [value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION]
        if given:
            return await self._by_credentials(_bearer(given))
        caller = None if self._tenants is None else self._tenants.value.caller_with(certificate_names(context))
        if caller is None:
            raise Rejected(Cause.MISSING)
        return caller

    async def _by_credentials(self, credentials: str) -> Caller:
        if self._tokens is not None and is_token(credentials):
            return await self._tokens.identify(credentials)
        if self._keys is None:
            raise Rejected(Cause.MALFORMED if self._tokens is not None else Cause.UNKNOWN)
        return self._keys.value.identify(credentials)


def _bearer(given: list[str | bytes]) -> str:
    """Return what follows `Bearer`, the only scheme there is."""
    value = given[0] if len(given) == 1 else ""
    if not isinstance(value, str) or value[: len(_SCHEME)].lower() != _SCHEME or not value.isascii():
        raise Rejected(Cause.MALFORMED)
    return value[len(_SCHEME) :].strip()
