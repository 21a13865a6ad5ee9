"""What this router knows of tenants' usage by itself: its own requests and their tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvern.services.router.identity.policy import TenantPolicy
from kvern.services.router.limits.line import Kind, Line
from kvern.services.router.limits.verdict import CONCURRENCY_RETRY_S, Limit, Refusal


@dataclass(slots=True)
class _Count:
    """One tenant's. A bucket fills up steadily, holds what a minute brings, and may go into debt."""

    policy: TenantPolicy
    level: float
    at: float
    requests: dict[Kind, set[str]] = field(default_factory=lambda: {kind: set() for kind in Kind})

    def refill(self, policy: TenantPolicy, now: float) -> None:
        rate = (policy.tokens_per_minute or 0) / 60
        self.level = min(float(policy.tokens_per_minute or 0), self.level + rate * (now - self.at))
        self.policy, self.at = policy, now

    @property
    def is_idle(self) -> bool:
        return not any(self.requests.values()) and self.level >= (self.policy.tokens_per_minute or 0)


class LocalCounts:
    """All tenants' that have requests here, or had them a moment ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, _Count] = {}

    def refusal(self, line: Line, policy: TenantPolicy) -> Refusal | None:
        """Return what stands against one request more."""
        count = self._count(line.tenant, policy)
        if policy.max_concurrent is not None and len(count.requests[line.kind]) >= policy.max_concurrent:
            return Refusal(Limit.CONCURRENCY, CONCURRENCY_RETRY_S)
        if policy.tokens_per_minute is not None and count.level <= 0:
            return Refusal(Limit.TOKENS, (1 - count.level) * 60 / policy.tokens_per_minute)
        return None

    def begin(self, line: Line, policy: TenantPolicy, request: str) -> None:
        self._count(line.tenant, policy).requests[line.kind].add(request)

    def charge(self, tenant: str, policy: TenantPolicy, num_tokens: int) -> None:
        if policy.tokens_per_minute is not None:
            self._count(tenant, policy).level -= num_tokens

    def end(self, line: Line, request: str) -> None:
        self._counts[line.tenant].requests[line.kind].discard(request)

    def is_in_flight(self, line: Line, request: str) -> bool:
        return line.tenant in self._counts and request in self._counts[line.tenant].requests[line.kind]

    def in_flight(self) -> Iterator[tuple[Line, list[str]]]:
        """Yield the requests here, by line."""
        for tenant, count in list(self._counts.items()):
            for kind, requests in count.requests.items():
                if requests:
                    yield Line(tenant, kind), list(requests)

    def prune(self) -> None:
        """Forget tenants that have nothing here and owe nothing."""
        for tenant, count in list(self._counts.items()):
            count.refill(count.policy, self._clock())
            if count.is_idle:
                del self._counts[tenant]

    def _count(self, tenant: str, policy: TenantPolicy) -> _Count:
        now = self._clock()
        count = self._counts.get(tenant)
        if count is None:
            count = self._counts[tenant] = _Count(policy, float(policy.tokens_per_minute or 0), now)
        count.refill(policy, now)
        return count
