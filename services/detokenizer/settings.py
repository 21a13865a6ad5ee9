"""Settings of the detokenizer service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from kvern.services.runtime.model_source import DEFAULT_MODEL
from kvern.services.runtime.settings import Addresses, ServiceSettings, check_tcp_address
from kvern.services.runtime.validate import MAX_NAME_CHARS


class DetokenizerSettings(ServiceSettings):
    """Kvern's detokenizer: a replica's front door."""

    model: str = DEFAULT_MODEL
    """The engine's model: a folder, a .gguf file, a hub id (owner/name), or smollm2. Only its tokenizer is read."""

    engine: str = Field(min_length=1)
    """Address of the engine: unix:/path or host:port."""

    max_streams: int = Field(1024, ge=1)
    """Most Serve calls at once; one more is refused with RESOURCE_EXHAUSTED."""

    router_identities: Addresses = Field((), validate_default=True)
    """Names in the certificates of the routers, of which one must be a caller's: DNS names or URIs, or *.suffix for all
    DNS names that end in it; repeat, or join with commas. Callers over a Unix socket are not asked. Needs
    tls-client-ca. Default: everybody may call."""

    ticket_key_file: Path | None = None
    """File of the keys that routers sign tickets with, as they are given it. Clients may then call this replica with
    a ticket of Route, and not without. Default: no tickets."""

    max_parked_s: float = Field(60.0, gt=0)
    """Seconds that a request may be parked in the engine because its reader does not keep up; then it ends."""

    smg_listen: Annotated[str, AfterValidator(check_tcp_address)] | None = None
    """host:port to serve vllm.grpc.engine on, for SMG, in plaintext and to whoever reaches it. Default: nowhere."""

    smg_salt: str = Field("", max_length=MAX_NAME_CHARS)
    """Cache salt of all requests that come by smg_listen."""

    smg_kv_events: bool = False
    """Tell SMG which blocks are cached, with their token ids. The engine needs the same setting."""

    @field_validator("smg_kv_events")
    @classmethod
    def _needs_a_door(cls, smg_kv_events: bool, info: ValidationInfo) -> bool:
        if smg_kv_events and info.data.get("smg_listen") is None:
            raise ValueError("needs smg_listen: they are told there")
        return smg_kv_events

    @field_validator("router_identities")
    @classmethod
    def _identities_are_in_certificates(cls, identities: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if identities and info.data.get("tls_client_ca") is None:
            raise ValueError("needs tls_client_ca: without it callers show no certificates")
        return identities
