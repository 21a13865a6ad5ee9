"""Whether a tenant may have one request more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvern.services.router.identity.policy import TenantPolicy
from kvern.services.runtime.errors import ResourceExhausted

CONCURRENCY_RETRY_S = 1.0
"""Requests end when they end: what a client is told to wait for one of them."""


class Limit(StrEnum):
    """ErrorInfo.reason of what a limit refuses."""

    CONCURRENCY = "TENANT_CONCURRENCY"
    TOKENS = "TENANT_TOKENS"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A limit is reached."""

    limit: Limit
    retry_after_s: float

    def error(self, policy: TenantPolicy) -> ResourceExhausted:
        text = {
            Limit.CONCURRENCY: f"{policy.max_concurrent} requests of this tenant are in flight",
            Limit.TOKENS: f"this tenant has used its {policy.tokens_per_minute} tokens a minute",
        }
        return ResourceExhausted(text[self.limit], retry_after_s=self.retry_after_s, reason=self.limit.value)
