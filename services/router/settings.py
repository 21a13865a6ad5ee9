"""Settings of the router service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from kvern.services.runtime.certificates import redis_certificate_files
from kvern.services.runtime.settings import Addresses, RedisPasswordFile, RedisUrl, ServiceSettings

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


def _jwks_source(source: str) -> str:
    url = urlsplit(source)
    if "://" not in source or url.scheme == "https" or (url.scheme == "http" and url.hostname in _LOCAL_HOSTS):
        return source
    raise ValueError("must be an https URL or a file: over http anybody on the way could answer")


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

    api_keys: Path | None = None
    """YAML file of API keys: who has each, by its SHA-256. Read again when it changes. With this, jwt_issuer or tenants
    callers must show who they are. Default: everybody may do everything."""

    jwt_issuer: str | None = Field(None, min_length=1)
    """Issuer (iss) of tokens (JWT) to accept. Needs jwt_audience and jwt_jwks."""

    jwt_audience: str | None = Field(None, min_length=1)
    """Audience (aud) that those tokens must name."""

    jwt_jwks: Annotated[str, AfterValidator(_jwks_source)] | None = Field(None, min_length=1)
    """Where the issuer's public keys are: an https URL, or a file."""

    jwt_tenant_claim: str = Field("tenant", min_length=1)
    """Claim of a token that names its tenant."""

    jwt_roles_claim: str = Field("roles", min_length=1)
    """Claim of a token that holds its roles, user and admin among them. A token without it has the role user."""

    tenants: Path | None = None
    """YAML file of tenants: models, priority and limits of each, and whose certificates are whose. Read again when it
    changes. Needs salt_secret_file, and digest_key_file at the tokenizer and the engines. Default: all callers share
    one cache, without limits."""

    salt_secret_file: Path | None = None
    """File with a secret of at least 32 bytes, from which tenants' salts are made; the same for all routers."""

    limit_budget_ms: float = Field(10.0, gt=0)
    """Most milliseconds that a request of a tenant with limits waits for Redis. Then this router counts by itself."""

    ticket_key_file: Path | None = None
    """File of keys of at least 32 bytes, one a line, the same for routers and replicas. Route signs tickets with the
    first one, by which replicas serve clients that call them; it is read again when it changes. Default: no tickets."""

    @field_validator("replicas")
    @classmethod
    def _some_way_to_find_them(cls, replicas: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not replicas and info.data.get("redis") is None:
            raise ValueError("give the replicas' addresses, or redis, where they register")
        return replicas

    @model_validator(mode="after")
    def _identity_is_whole(self) -> Self:
        if (self.tenants is None) != (self.salt_secret_file is None):
            raise ValueError("tenants needs salt_secret_file, and digest_key_file at the tokenizer and the engines")
        token_rules = {"jwt_issuer": self.jwt_issuer, "jwt_audience": self.jwt_audience, "jwt_jwks": self.jwt_jwks}
        missing = [name for name, value in token_rules.items() if value is None]
        if missing and len(missing) < len(token_rules):
            raise ValueError(f"{', '.join(missing)}: needed for tokens")
        return self

    @property
    def asks_callers(self) -> bool:
        """Whether callers must show who they are."""
        return self.api_keys is not None or self.jwt_issuer is not None or self.tenants is not None

    @property
    def certificate_files(self) -> list[str]:
        return [*super().certificate_files, *redis_certificate_files(self.redis)]
