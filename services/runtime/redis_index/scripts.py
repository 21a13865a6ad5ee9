"""What must happen in Redis at once: Lua scripts, for Redis 6.2 and later.

Writers' scripts answer OK, GAP (the index is not what the writer thinks: it must send a snapshot) or STALE (a later
start of the replica is registered).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError

from kvern.services.runtime.redis_index.connection import RedisClient

REDIS_ERRORS = (RedisError, RedisClusterException, OSError)
"""What a call can end with when Redis is away, refuses or does not answer in time (TimeoutError is an OSError)."""


class Answer(StrEnum):
    OK = "OK"
    GAP = "GAP"
    STALE = "STALE"


class Script:
    """A script that is sent once to each server, and known by its hash from then on."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def run(self, redis: RedisClient, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """Raises one of REDIS_ERRORS."""
        try:
            return await redis.execute_command("EVALSHA", self._sha, len(keys), *keys, *arguments)
        except NoScriptError:
            return await redis.execute_command("EVAL", self.source, len(keys), *keys, *arguments)
        except ResponseError as error:
            # From within a script Redis 6.2 reports it as an error of the script.
            if "READONLY" in str(error):
                await _leave_replica(redis)
            raise


async def _leave_replica(redis: RedisClient) -> None:
    """Make the next call connect anew: who was the primary has become a replica, and kept its connections."""
    if isinstance(redis, Redis):
        await redis.connection_pool.disconnect()


_IS_STALE = """
local function is_stale(registry, replica, epoch)
  local known = redis.call('HGET', registry, replica)
  return known and cjson.decode(known).epoch > epoch
end
"""

_SPLIT = """
local function split(digests)
  local members = {}
  for first = 1, #digests, 8 do
    members[#members + 1] = string.sub(digests, first, first + 7)
  end
  return members
end
"""

JOIN = Script("""
-- Keep a pool listed, drop those that nobody joins any more, and return its number of shards, which only grows.
local pool, model, contract, num_shards, expiry_s = unpack(ARGV)
local now_s = tonumber(redis.call('TIME')[1])
num_shards = tonumber(num_shards)
local pools = redis.call('HGETALL', KEYS[1])
for i = 1, #pools, 2 do
  local known = cjson.decode(pools[i + 1])
  if pools[i] == pool then
    num_shards = math.max(num_shards, known.num_shards)
  elseif now_s - known.joined_s > tonumber(expiry_s) then
    redis.call('HDEL', KEYS[1], pools[i])
  end
end
local listed = {model = model, contract = contract, num_shards = num_shards, joined_s = now_s}
redis.call('HSET', KEYS[1], pool, cjson.encode(listed))
return num_shards
""")

HEARTBEAT = Script("""
-- Register, take the lease, and compare what the index has with what its writer has sent.
-- Returns the answer, the epoch registered before, and the number of replicas of the shard.
local registry, lease, meta, blocks = unpack(KEYS)
local replica, epoch, entry, lease_ms, expiry_s, seq, count, xor = unpack(ARGV)
local known = redis.call('HGET', registry, replica)
local before = known and cjson.decode(known).epoch or epoch
if before > epoch then
  return {'STALE', before, 0}
end
redis.call('HSET', registry, replica, entry)
redis.call('EXPIRE', registry, expiry_s)
redis.call('SET', lease, epoch, 'PX', lease_ms)
redis.call('EXPIRE', meta, expiry_s)
redis.call('EXPIRE', blocks, expiry_s)
local sent = redis.call('HMGET', meta, 'seq', 'count', 'xor')
local is_same = sent[1] == seq and sent[2] == count and sent[3] == xor
local is_whole = redis.call('SCARD', blocks) == tonumber(count)
return {is_same and is_whole and 'OK' or 'GAP', before, redis.call('HLEN', registry)}
""")

APPLY = Script(
    _IS_STALE
    + _SPLIT
    + """
-- Change the blocks, if they are as the writer left them and change as it expects. Otherwise they wait for a snapshot.
local registry, meta, blocks = unpack(KEYS)
local replica, epoch, seq_from, seq_to, count, xor, expiry_s, adds, dels = unpack(ARGV)
if is_stale(registry, replica, epoch) then
  return 'STALE'
end
local sent = redis.call('HMGET', meta, 'seq', 'count')
if sent[1] ~= seq_from or redis.call('SCARD', blocks) ~= tonumber(sent[2]) then
  return 'GAP'
end
local is_exact = true
if #adds > 0 then
  local members = split(adds)
  is_exact = redis.call('SADD', blocks, unpack(members)) == #members
end
if #dels > 0 then
  local members = split(dels)
  is_exact = redis.call('SREM', blocks, unpack(members)) == #members and is_exact
end
if not is_exact then
  redis.call('DEL', meta)
  return 'GAP'
end
redis.call('HSET', meta, 'seq', seq_to, 'count', count, 'xor', xor)
redis.call('EXPIRE', meta, expiry_s)
redis.call('EXPIRE', blocks, expiry_s)
return 'OK'
"""
)

STAGE = Script(
    _SPLIT
    + """
-- Add to a snapshot that nobody reads so far.
local expiry_s, digests = unpack(ARGV)
redis.call('SADD', KEYS[1], unpack(split(digests)))
redis.call('EXPIRE', KEYS[1], expiry_s)
"""
)

COMMIT = Script(
    _IS_STALE
    + """
-- Make a staged snapshot the blocks.
local registry, meta, blocks, staging = unpack(KEYS)
local replica, epoch, seq, count, xor, expiry_s = unpack(ARGV)
if is_stale(registry, replica, epoch) then
  redis.call('UNLINK', staging)
  return 'STALE'
end
if redis.call('SCARD', staging) ~= tonumber(count) then
  redis.call('UNLINK', staging)
  return 'GAP'
end
redis.call('UNLINK', blocks)
if tonumber(count) > 0 then
  redis.call('RENAME', staging, blocks)
end
redis.call('HSET', meta, 'seq', seq, 'count', count, 'xor', xor)
redis.call('EXPIRE', meta, expiry_s)
redis.call('EXPIRE', blocks, expiry_s)
return 'OK'
"""
)

FORGET = Script("""
-- Remove one start of a replica. A later start is left alone.
local registry, lease, meta, blocks, staging = unpack(KEYS)
local replica, epoch = unpack(ARGV)
local known = redis.call('HGET', registry, replica)
if known and cjson.decode(known).epoch == epoch then
  redis.call('HDEL', registry, replica)
  redis.call('DEL', lease)
end
redis.call('UNLINK', meta, blocks, staging)
""")

LOOKUP = Script("""
-- How many of a prompt's first blocks each replica has. KEYS: their blocks. Returns numbers joined by commas.
-- Blocks are prefix-closed, so a match is found by bisection. Many replicas agree, most often in a system prompt or in
-- nothing, so the most frequent match is tried first, and then whether there is one block more, or any; but no longer
-- once that has settled nothing for three replicas. All in one loop: a function's call costs a tenth of a probe.
local digests = ARGV[1]
local total = #digests / 8
local call, sub, floor = redis.call, string.sub, math.floor
local members, matches, frequency = {}, {}, {}
local guess, num_misses = total, 0
for i, blocks in ipairs(KEYS) do
  local low, high, num_probes = 0, total, 0
  local is_guessed = num_misses < 3
  local position = is_guessed and guess or floor((total + 1) / 2)
  while low < high do
    local member = members[position]
    if not member then
      member = sub(digests, position * 8 - 7, position * 8)
      members[position] = member
    end
    if call('SISMEMBER', blocks, member) == 1 then
      low = position
    else
      high = position - 1
    end
    num_probes = num_probes + 1
    if is_guessed and num_probes == 1 then
      position = low + 1
    else
      position = floor((low + high + 1) / 2)
    end
  end
  if is_guessed then
    num_misses = num_probes > 2 and num_misses + 1 or 0
  end
  frequency[low] = (frequency[low] or 0) + 1
  if low > 0 and frequency[low] >= (frequency[guess] or 0) then
    guess = low
  end
  matches[i] = low
end
return table.concat(matches, ',')
""")
