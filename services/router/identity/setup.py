"""From settings to what tells callers apart."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from kvern.services.router.identity.api_keys import ApiKeys
from kvern.services.router.identity.authenticator import Authenticator
from kvern.services.router.identity.door import Door, count_failures
from kvern.services.router.identity.jwks import Jwks, tell_age
from kvern.services.router.identity.jwt_tokens import JwtTokens, TokenRules
from kvern.services.router.identity.salts import Salts
from kvern.services.router.identity.tenants import Tenants
from kvern.services.router.settings import RouterSettings
from kvern.services.runtime.interceptors import Admit, admit_all
from kvern.services.runtime.reloaded_file import ReloadedFile
from kvern.services.runtime.secret_file import read_secret


@dataclass(frozen=True, slots=True)
class Identity:
    """What a router needs to tell callers apart."""

    admit: Admit = admit_all
    salts: Salts | None = None
    """None: there are no tenants."""
    watches: list[Coroutine[Any, Any, None]] = field(default_factory=list)
    """What must run for ever, so that files and keys are up to date."""

    def alias(self, tenant: str) -> str:
        """Return what stands for a tenant where others can see it."""
        return tenant if self.salts is None else self.salts.alias(tenant)


def open_identity(settings: RouterSettings, registry: CollectorRegistry) -> Identity:
    """Read what the settings name. Raises UnusableFile, SettingsError."""
    failures = count_failures(registry)  # told by every router, so that dashboards need not know which asks
    if not settings.asks_callers:
        return Identity()
    watches: list[Coroutine[Any, Any, None]] = []
    keys = None if settings.api_keys is None else ReloadedFile(settings.api_keys, ApiKeys.parse)
    tenants = None if settings.tenants is None else ReloadedFile(settings.tenants, Tenants.parse)
    secret = settings.salt_secret_file
    salts = None if secret is None else Salts(read_secret(secret, "salt_secret_file"))
    watches += [file.watch() for file in (keys, tenants) if file is not None]
    tokens = None
    if (rules := _token_rules(settings)) is not None and settings.jwt_jwks is not None:
        jwks = Jwks(settings.jwt_jwks)
        tell_age(registry, jwks)
        tokens = JwtTokens(rules, jwks)
        watches.append(jwks.watch())
    door = Door(Authenticator(keys, tokens, tenants), tenants, failures)
    return Identity(door.admit, salts, watches)


def _token_rules(settings: RouterSettings) -> TokenRules | None:
    if settings.jwt_issuer is None or settings.jwt_audience is None:
        return None
    return TokenRules(settings.jwt_issuer, settings.jwt_audience, settings.jwt_tenant_claim, settings.jwt_roles_claim)
