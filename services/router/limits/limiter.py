"""Admits tenants' requests within their limits."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import structlog
from prometheus_client import CollectorRegistry, Counter

from kvern.services.router.identity.caller import Caller
from kvern.services.router.identity.policy import TenantPolicy
from kvern.services.router.limits.line import Kind, Line
from kvern.services.router.limits.local_counts import LocalCounts
from kvern.services.router.limits.shared_counts import LEASE_S, SharedCounts
from kvern.services.router.limits.verdict import Refusal
from kvern.services.runtime.redis_index.scripts import REDIS_ERRORS

MAX_FAILURES = 3
"""Answers in a row that did not come in time, before requests are spared the wait for a moment."""
REST_S = 1.0
MAX_NOTES = 8192
"""What waits to be written to Redis. More is not written: leases end by themselves, and some tokens go uncounted."""
NOTE_TIMEOUT_S = 1.0
NUM_WRITERS = 8
"""Notes under way at once, in any order: one after the other, their round trips would not do for a thousand requests a
second."""

_log = structlog.get_logger("kvern.limits")

_Note = Callable[[], Awaitable[None]]


class LimitMetrics:
    """No tenant is a label: there may be any number of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.fallbacks = Counter(
            "kvern_router_limit_fallbacks",
            "Requests of tenants with limits that this router decided on by its own count, as Redis did not answer.",
            registry=registry,
        )
        self.notes_lost = Counter(
            "kvern_router_limit_notes_lost",
            "Ends of requests and charges of tokens that were not written to Redis.",
            registry=registry,
        )


class Usage:
    """What one request uses. Charges do not wait for Redis."""

    def __init__(self, charge: Callable[[int], None]) -> None:
        self._charge = charge

    def charge(self, num_tokens: int) -> None:
        if num_tokens:
            self._charge(num_tokens)


_UNCOUNTED = Usage(lambda _: None)


class TenantLimits:
    """Both counts of tenants' usage: that of all routers, and this one's, which it falls back on."""

    def __init__(
        self, shared: SharedCounts | None, alias: Callable[[str], str], budget_s: float, registry: CollectorRegistry
    ) -> None:
        """alias: what stands for a tenant in Redis. budget_s: most seconds to wait for it."""
        self._shared = shared
        self._local = LocalCounts()
        self._alias = alias
        self._budget_s = budget_s
        self._metrics = LimitMetrics(registry)
        self._router = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._notes: asyncio.Queue[_Note] = asyncio.Queue(MAX_NOTES)
        self._ended: dict[Line, set[str]] = {}
        """Requests whose ends wait among the notes. The line's next request takes them along, so who asks again when
        one has ended does not find it counted still."""
        self._num_failures = 0
        self._rests_until = 0.0

    @asynccontextmanager
    async def admit(self, caller: Caller, kind: Kind) -> AsyncIterator[Usage]:
        """Count a request of a caller as in flight until the block ends. Raises ResourceExhausted at a limit."""
        policy = caller.policy
        if policy.max_concurrent is None and policy.tokens_per_minute is None:
            yield _UNCOUNTED
            return
        line, request = Line(self._alias(caller.tenant), kind), f"{self._router}:{next(self._numbers)}"
        if (refusal := await self._begin(line, policy, request)) is not None:
            raise refusal.error(policy)
        self._local.begin(line, policy, request)
        try:
            yield Usage(partial(self._charge, line.tenant, policy))
        finally:
            self._local.end(line, request)
            self._end(line, request)

    async def watch(self) -> None:
        """Write what is to be written to Redis, and renew what is in flight, for ever."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_WRITERS):
                tasks.create_task(self._write())
            tasks.create_task(self._renew())

    async def _begin(self, line: Line, policy: TenantPolicy, request: str) -> Refusal | None:
        if self._shared is None:
            return self._local.refusal(line, policy)
        if time.monotonic() >= self._rests_until:
            ended = self._ended.pop(line, set())
            try:
                async with asyncio.timeout(self._budget_s):
                    refusal = await self._shared.begin(line, policy, request, ended)
            except asyncio.CancelledError:
                self._end(line, request)  # it may have been counted all the same
                raise
            except REDIS_ERRORS as error:
                self._fail(error)
                self._end(line, request)  # likewise
            else:
                self._num_failures = 0
                return refusal
        self._metrics.fallbacks.inc()
        return self._local.refusal(line, policy)

    def _fail(self, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self._rests_until = time.monotonic() + REST_S
        if self._num_failures == MAX_FAILURES:
            _log.warning("tenants' limits are counted here alone", error=str(error) or type(error).__name__)

    def _charge(self, tenant: str, policy: TenantPolicy, num_tokens: int) -> None:
        self._local.charge(tenant, policy, num_tokens)
        if self._shared is not None:
            self._note(partial(self._shared.charge, tenant, policy, num_tokens))

    def _end(self, line: Line, request: str) -> None:
        if self._shared is not None and self._note(partial(self._write_end, self._shared, line, request)):
            self._ended.setdefault(line, set()).add(request)

    async def _write_end(self, shared: SharedCounts, line: Line, request: str) -> None:
        try:
            await shared.end(line, request)
        finally:
            ended = self._ended.get(line, set())
            ended.discard(request)
            if not ended:
                self._ended.pop(line, None)

    def _note(self, note: _Note) -> bool:
        """Return whether a note will be written."""
        try:
            self._notes.put_nowait(note)
        except asyncio.QueueFull:
            self._metrics.notes_lost.inc()
            return False
        return True

    async def _write(self) -> None:
        while True:
            note = await self._notes.get()
            try:
                async with asyncio.timeout(NOTE_TIMEOUT_S):
                    await note()
            except REDIS_ERRORS:
                self._metrics.notes_lost.inc()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            self._local.prune()
            for line, requests in self._local.in_flight():
                if self._shared is not None:
                    with suppress(*REDIS_ERRORS):
                        async with asyncio.timeout(NOTE_TIMEOUT_S):
                            await self._shared.renew(line, requests)
                for request in requests:
                    if not self._local.is_in_flight(line, request):
                        self._end(line, request)  # it ended meanwhile, and may have been revived
