"""The index of prefixes and the registry of replicas, both in Redis: what writer and reader must agree on.

The index is a cache: losing it costs hits, never a request.
"""

from kvern.services.runtime.redis_index.connection import RedisClient, open_redis
from kvern.services.runtime.redis_index.registry import RegistryEntry, ReplicaLoad, ReplicaState

__all__ = ["RedisClient", "RegistryEntry", "ReplicaLoad", "ReplicaState", "open_redis"]
