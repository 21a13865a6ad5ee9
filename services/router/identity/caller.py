"""Who makes a call."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import StringConstraints

from kvern.services.router.identity.policy import UNLIMITED, TenantPolicy

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,127}$"
"""Of tenants and ids: they are in logs, so they hold nothing that a log could be forged with."""

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class Role(StrEnum):
    """What a caller may do."""

    USER = "user"
    """Ask for models' work."""
    ADMIN = "admin"
    """All of that, and see and change how the service runs."""


USERS = frozenset({Role.USER})


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who is known."""

    id: str
    """key:ID, token:HASH or certificate:NAME. Empty: nobody asked who it is."""
    tenant: str
    roles: frozenset[Role] = USERS
    policy: TenantPolicy = field(default=UNLIMITED)
    """What its tenant may do, as of now."""

    def has(self, role: Role) -> bool:
        return role in self.roles or Role.ADMIN in self.roles


ANONYMOUS = Caller("", "", frozenset(Role))
"""Everybody, where callers are not told apart."""

_current: ContextVar[Caller] = ContextVar("caller", default=ANONYMOUS)


def current_caller() -> Caller:
    """Return who makes the call that is handled now."""
    return _current.get()


def set_caller(caller: Caller) -> None:
    """Say who makes the call that is handled now."""
    _current.set(caller)
