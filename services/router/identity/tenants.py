"""Tenants: what a file says of each, and whose certificates are whose."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvern.services.router.identity.caller import USERS, Caller, Name, Role
from kvern.services.router.identity.policy import UNLIMITED, TenantPolicy
from kvern.services.runtime.errors import PermissionDenied
from kvern.services.runtime.reloaded_file import parse_yaml

MAX_TENANTS = 100_000
MAX_CERTIFICATES = 10_000

UNKNOWN_TENANT = "UNKNOWN_TENANT"


class CertificateEntry(BaseModel):
    """Whose a client's certificate is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    """One of its alternative names."""
    tenant: Name
    roles: frozenset[Role] = USERS

    @property
    def caller(self) -> Caller:
        return Caller(f"certificate:{self.name}", self.tenant, self.roles)


class Tenants(BaseModel):
    """The tenants file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    unknown_tenants: Literal["refuse", "default"] = "refuse"
    """What becomes of tenants that are not listed."""
    default: TenantPolicy = UNLIMITED
    """Of those, where they are not refused."""
    tenants: dict[Name, TenantPolicy] = Field(default_factory=dict, max_length=MAX_TENANTS)
    certificates: tuple[CertificateEntry, ...] = Field((), max_length=MAX_CERTIFICATES)

    @field_validator("certificates")
    @classmethod
    def _are_distinct(cls, certificates: tuple[CertificateEntry, ...]) -> tuple[CertificateEntry, ...]:
        if len({entry.name for entry in certificates}) < len(certificates):
            raise ValueError("two entries have the same name")
        return certificates

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises ValueError."""
        return parse_yaml(data, cls)

    def policy_of(self, tenant: str) -> TenantPolicy:
        """Raises PermissionDenied for a tenant that is not served."""
        policy = self.tenants.get(tenant)
        if policy is not None:
            return policy
        if self.unknown_tenants == "default":
            return self.default
        raise PermissionDenied("this tenant is not served here", reason=UNKNOWN_TENANT)

    def caller_with(self, names: frozenset[str]) -> Caller | None:
        """Return who shows a certificate with these names, None if nobody is known by them."""
        return next((entry.caller for entry in self.certificates if entry.name in names), None)
