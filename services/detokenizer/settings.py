"""Settings of the detokenizer service."""

from __future__ import annotations

from pydantic import Field

from kvern.services.runtime.model_source import DEFAULT_MODEL
from kvern.services.runtime.settings import ServiceSettings


class DetokenizerSettings(ServiceSettings):
    """Kvern's detokenizer: a replica's front door."""

    model: str = DEFAULT_MODEL
    """The engine's model: a folder, a .gguf file, a hub id (owner/name), or smollm2. Only its tokenizer is read."""

    engine: str = Field(min_length=1)
    """Address of the engine: unix:/path or host:port."""

    max_streams: int = Field(1024, ge=1)
    """Most Serve calls at once; one more is refused with RESOURCE_EXHAUSTED."""

    max_parked_s: float = Field(60.0, gt=0)
    """Seconds that a request may be parked in the engine because its reader does not keep up; then it ends."""
