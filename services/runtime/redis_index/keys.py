"""Every key in Redis is built here. One call's keys share a hash tag, so they share a slot of a cluster."""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Self

from kvern.services.runtime.redis_index.registry import RegistryEntry, epoch_text

POOLS_KEY = "kvern:pools"
"""HASH of pool id -> model, contract, number of shards, when last joined."""

MAX_SHARD_REPLICAS = 64
"""A lookup in a shard takes a time in proportion to its replicas, during which Redis does nothing else."""


class Shard(NamedTuple):
    """A part of a pool whose keys live on one server."""

    pool: str
    number: int

    def key(self, kind: str, *names: str) -> str:
        return ":".join((f"kvern:{{{self.pool}.{self.number}}}", kind, *names))

    @property
    def registry(self) -> str:
        """HASH of replica id -> RegistryEntry as JSON."""
        return self.key("registry")

    def lease(self, replica: str) -> str:
        """The epoch of who lives."""
        return self.key("lease", replica)


def pool_id(model: str, contract: str) -> str:
    """Replicas of one pool can reuse each other's prefixes: same model's name, same contract."""
    # Short, since Redis 6.2 makes a new copy of a key above 64 bytes for each call of a script: a sixth of a lookup.
    return hashlib.blake2b(f"{len(model)}:{model}{contract}".encode(), digest_size=5).hexdigest()


def home_shard(entry: RegistryEntry, num_shards: int) -> Shard:
    """Return where a replica registers."""
    replica_hash = int.from_bytes(hashlib.blake2b(entry.replica.encode(), digest_size=8).digest())
    return Shard(pool_id(entry.model, entry.contract), replica_hash % num_shards)


def limit_leases(tenant: str, kind: str) -> str:
    """ZSET of a tenant's requests of a kind in flight -> when their leases end, in ms. `tenant`: what stands for it."""
    return f"kvern:limits:{{{tenant}}}:leases:{kind}"


def limit_bucket(tenant: str) -> str:
    """HASH of level and at_ms: a tenant's tokens. Missing: as many as there may be."""
    return f"kvern:limits:{{{tenant}}}:tokens"


class ReplicaKeys(NamedTuple):
    """The keys of one start of one replica."""

    registry: str
    lease: str
    meta: str
    """HASH of seq, count and xor, as of the last change of `blocks`."""
    blocks: str
    """SET of the first 8 bytes of each resident digest. It is prefix-closed at all times."""
    staging: str
    """SET that becomes `blocks` once it is whole."""

    @classmethod
    def of(cls, shard: Shard, replica: str, epoch: int) -> Self:
        start = (replica, epoch_text(epoch))
        return cls(
            shard.registry,
            shard.lease(replica),
            shard.key("meta", *start),
            shard.key("blocks", *start),
            shard.key("staging", *start),
        )
