"""Settings of the router service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from kvern.services.runtime.certificates import redis_certificate_files
from kvern.services.runtime.settings import Addresses, RedisPasswordFile, RedisUrl, ServiceSettings


class RouterSettings(ServiceSettings):
    """Kvern's router: what clients talk to."""

    tokenizer: str = Field(min_length=1)
    """Address of the tokenizer: unix:/path or host:port."""

    redis: RedisUrl | None = None
    """URL of the Redis with the prefix index and the registry of replicas, as the engines are given it. Default: none,
    and requests are placed by load."""

    redis_password_file: RedisPasswordFile = None
    """File with the password for redis, of the user that the URL names. It is read again when it changes. Default: the
    URL has it, or there is none."""

    replicas: Addresses = Field((), validate_default=True)
    """Addresses of the replicas' front doors (their detokenizers), or dns:///name:port for all addresses of a name;
    repeat, or join with commas. Needed without redis; with it, what the router starts from when redis is away."""

    replica_authority: str | None = Field(None, min_length=1)
    """Name by which replicas are called, whatever address they are dialled at: service meshes route by it, certificates
    hold it. Default: the address."""

    routing_policy: Literal["prefix", "least-loaded", "round-robin", "random"] = "prefix"
    """How replicas are chosen. prefix: by the prompt tokens each would have to compute, what is queued there and its
    requests; least-loaded: the same without regard to what is cached."""

    index_budget_ms: float = Field(5.0, gt=0)
    """Most milliseconds that a request waits to hear who holds its prefix. Then it is placed by load."""

    hedge_after_s: float | None = Field(None, gt=0)
    """Seconds without output after which a second replica is asked as well; the first to answer goes on, the other is
    dropped. At most one request in ten is sent twice. Default: never."""

    max_streams: int = Field(4096, ge=1)
    """Most Generate calls at once; one more is refused with RESOURCE_EXHAUSTED."""

    max_stalled_s: float = Field(120.0, gt=0)
    """Seconds that one message may wait for a client that does not read; then its call ends. Longer than a replica
    allows, whose limit counts from when its request had to stand still."""

    ticket_key_file: Path | None = None
    """File of keys of at least 32 bytes, one a line, the same for routers and replicas. Route signs tickets with the
    first one, by which replicas serve clients that call them; it is read again when it changes. Default: no tickets."""

    @property
    def certificate_files(self) -> list[str]:
        return [*super().certificate_files, *redis_certificate_files(self.redis)]

    @field_validator("replicas")
    @classmethod
    def _some_way_to_find_them(cls, replicas: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not replicas and info.data.get("redis") is None:
            raise ValueError("give the replicas' addresses, or redis, where they register")
        return replicas
