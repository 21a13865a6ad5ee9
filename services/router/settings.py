"""Settings of the router service."""

from __future__ import annotations

from pydantic import Field

from kvern.services.runtime.settings import Addresses, ServiceSettings


class RouterSettings(ServiceSettings):
    """Kvern's router: what clients talk to."""

    tokenizer: str = Field(min_length=1)
    """Address of the tokenizer: unix:/path or host:port."""

    replicas: Addresses = Field(min_length=1)
    """Addresses of the replicas' front doors (their detokenizers); repeat, or join with commas."""

    max_streams: int = Field(4096, ge=1)
    """Most Generate calls at once; one more is refused with RESOURCE_EXHAUSTED."""

    max_stalled_s: float = Field(120.0, gt=0)
    """Seconds that one message may wait for a client that does not read; then its call ends. Longer than a replica
    allows, whose limit counts from when its request had to stand still."""
