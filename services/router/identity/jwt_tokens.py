"""Tokens of an OIDC issuer (JWTs), checked by its public keys."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from kvern.services.router.identity.caller import NAME_PATTERN, USERS, Caller, Role
from kvern.services.router.identity.jwks import Jwks, PublicKey
from kvern.services.router.identity.rejection import Cause, Rejected

LEEWAY_S = 30
"""By how much the issuer's clock and ours may differ."""

MAX_TOKEN_CHARS = 8192
MAX_ROLES = 256

_REQUIRED = ["exp", "iss", "aud", "sub"]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What tokens must say, and where."""

    issuer: str
    audience: str
    tenant_claim: str
    roles_claim: str


class JwtTokens:
    """Tells whose a token is."""

    def __init__(self, rules: TokenRules, keys: Jwks) -> None:
        self._rules = rules
        self._keys = keys

    async def identify(self, token: str) -> Caller:
        """Return whose token this is. Raises Rejected, Unavailable while the issuer's keys are not known."""
        key = await self._keys.find(_key_id(token))
        if key is None:
            raise Rejected(Cause.UNKNOWN)
        claims = self._checked(token, key)
        tenant = claims.get(self._rules.tenant_claim)
        if not isinstance(tenant, str) or not re.fullmatch(NAME_PATTERN, tenant):
            raise Rejected(Cause.INVALID)
        who = f"{claims['iss']}\0{claims['sub']}".encode(errors="surrogatepass")
        subject = hashlib.sha256(who).hexdigest()[:16]
        return Caller(f"token:{subject}", tenant, _roles(claims.get(self._rules.roles_claim)))

    def _checked(self, token: str, key: PublicKey) -> Mapping[str, Any]:
        """Return a token's claims once its signature and times are right."""
        try:
            return jwt.decode(
                token,
                key.key,
                algorithms=list(key.algorithms),
                issuer=self._rules.issuer,
                audience=self._rules.audience,
                leeway=LEEWAY_S,
                options={"require": _REQUIRED},
            )
        except jwt.ExpiredSignatureError as error:
            raise Rejected(Cause.EXPIRED) from error
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise Rejected(Cause.INVALID) from error


def is_token(credentials: str) -> bool:
    """Whether this looks like a token rather than a key."""
    return credentials.count(".") == 2


def _key_id(token: str) -> str | None:
    """Return the id of the key that a token says it is signed with."""
    if len(token) > MAX_TOKEN_CHARS:
        raise Rejected(Cause.MALFORMED)
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
        raise Rejected(Cause.MALFORMED) from error
    if "crit" in header:  # what must be understood and is not
        raise Rejected(Cause.INVALID)
    kid = header.get("kid")
    return kid if isinstance(kid, str) else None


def _roles(claim: object) -> frozenset[Role]:
    """Return the roles that a claim names, of which others may be for other services. Without the claim, a user's."""
    if claim is None:
        return USERS
    names = claim.split() if isinstance(claim, str) else claim
    if not isinstance(names, list) or len(names) > MAX_ROLES:
        raise Rejected(Cause.INVALID)
    return frozenset(role for role in Role if role.value in names)
