"""Tenants' usage at all routers together, in Redis.

A request in flight is a lease that its router renews, so those of a router that died stop to count. Tokens are a
bucket: it fills up steadily, holds what a minute brings, and may go into debt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvern.services.router.identity.policy import TenantPolicy
from kvern.services.router.limits.line import Line
from kvern.services.router.limits.verdict import CONCURRENCY_RETRY_S, Limit, Refusal
from kvern.services.runtime.redis_index import RedisClient, keys
from kvern.services.runtime.redis_index.scripts import Script

LEASE_S = 30.0

_CLOCK = """
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""

_LEVEL = """
local function level_of(bucket, per_minute, now)
  local known = redis.call('HMGET', bucket, 'level', 'at_ms')
  if not known[1] then
    return per_minute
  end
  if tonumber(known[2]) > now then -- the clock was set back: from here on it counts
    redis.call('HSET', bucket, 'at_ms', string.format('%.0f', now))
  end
  return math.min(per_minute, known[1] + math.max(0, now - known[2]) * per_minute / 60000)
end
"""

_BEGIN = Script(
    _CLOCK
    + _LEVEL
    + """
-- Take a lease, if the limits allow it: 0 is no limit. Returns what refuses it, and for how many ms. What follows the
-- limits are leases to give back.
local leases, bucket = unpack(KEYS)
local request, lease_ms, max_concurrent, per_minute = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now = now_ms()
for i = 5, #ARGV do
  redis.call('ZREM', leases, ARGV[i])
end
redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
-- None is longer than this, unless the clock was set back: who still has it renews it.
redis.call('ZREMRANGEBYSCORE', leases, '(' .. string.format('%.0f', now + lease_ms), '+inf')
if max_concurrent > 0 and redis.call('ZCARD', leases) >= max_concurrent then
  return {'CONCURRENCY', 0}
end
if per_minute > 0 then
  local level = level_of(bucket, per_minute, now)
  if level <= 0 then
    return {'TOKENS', math.ceil((1 - level) * 60000 / per_minute)}
  end
end
redis.call('ZADD', leases, now + lease_ms, request)
redis.call('PEXPIRE', leases, lease_ms)
return {'OK', 0}
"""
)

_CHARGE = Script(
    _CLOCK
    + _LEVEL
    + """
-- Take tokens from the bucket, which is kept until it is full again.
local bucket, per_minute = KEYS[1], tonumber(ARGV[2])
local now = now_ms()
local level = level_of(bucket, per_minute, now) - ARGV[1]
redis.call('HSET', bucket, 'level', tostring(level), 'at_ms', string.format('%.0f', now))
redis.call('PEXPIRE', bucket, math.max(1, math.ceil((per_minute - level) * 60000 / per_minute)))
"""
)

_RENEW = Script(
    _CLOCK
    + """
local lease_ms = tonumber(ARGV[1])
local expires_at = now_ms() + lease_ms
for i = 2, #ARGV do
  redis.call('ZADD', KEYS[1], expires_at, ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], lease_ms)
"""
)


class SharedCounts:
    """Every method raises one of REDIS_ERRORS. Tenants are named by aliases."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def begin(self, line: Line, policy: TenantPolicy, request: str, ended: Iterable[str] = ()) -> Refusal | None:
        """Count one request more, or return what stands against it. ended: requests that count no more."""
        limits = (policy.max_concurrent or 0, policy.tokens_per_minute or 0)
        names = [_leases(line), keys.limit_bucket(line.tenant)]
        verdict, retry_ms = await _BEGIN.run(self._redis, names, request, round(LEASE_S * 1000), *limits, *ended)
        match verdict:
            case b"CONCURRENCY":
                return Refusal(Limit.CONCURRENCY, CONCURRENCY_RETRY_S)
            case b"TOKENS":
                return Refusal(Limit.TOKENS, retry_ms / 1000)
        return None

    async def charge(self, tenant: str, policy: TenantPolicy, num_tokens: int) -> None:
        if policy.tokens_per_minute is not None:
            await _CHARGE.run(self._redis, [keys.limit_bucket(tenant)], num_tokens, policy.tokens_per_minute)

    async def end(self, line: Line, request: str) -> None:
        await self._redis.execute_command("ZREM", _leases(line), request)

    async def renew(self, line: Line, requests: Sequence[str]) -> None:
        """Let requests in flight go on to count, also those that were admitted while Redis was away."""
        await _RENEW.run(self._redis, [_leases(line)], round(LEASE_S * 1000), *requests)


def _leases(line: Line) -> str:
    return keys.limit_leases(line.tenant, line.kind)
