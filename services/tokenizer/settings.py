"""Settings of the tokenizer service."""

from __future__ import annotations

from pydantic import Field

from kvern.services.runtime.model_source import DEFAULT_MODEL
from kvern.services.runtime.settings import ServiceSettings


class TokenizerSettings(ServiceSettings):
    """Kvern's tokenizer: text to token ids and back."""

    model: str = DEFAULT_MODEL
    """A folder, a .gguf file, a hub id (owner/name), or smollm2. Only its tokenizer is read."""

    served_model_name: str | None = Field(None, min_length=1)
    """What clients call the model. Default: the hub id, or the file's or folder's name."""
