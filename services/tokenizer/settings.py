"""Settings of the tokenizer service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field, StringConstraints

from kvern.services.runtime.model_source import DEFAULT_MODEL
from kvern.services.runtime.settings import ServiceSettings

_NonEmpty = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


def _pairs(value: object) -> object:
    """Read a variable, which is one string."""
    if not isinstance(value, str):
        return value
    return {name: model for name, _, model in (pair.partition("=") for pair in value.split(","))}


class TokenizerSettings(ServiceSettings):
    """Kvern's tokenizer: text to token ids and back."""

    model: str = DEFAULT_MODEL
    """A folder, a .gguf file, a hub id (owner/name), or smollm2. Only its tokenizer is read."""

    served_model_name: str | None = Field(None, min_length=1)
    """What clients call the model. Default: the hub id, or the file's or folder's name."""

    more_models: Annotated[dict[_NonEmpty, _NonEmpty], BeforeValidator(_pairs)] = Field(default_factory=dict)
    """Further models to serve, each as name=model; repeat, or join with commas."""

    digest_key_file: Path | None = None
    """File with a secret of at least 32 bytes, by which digests of cached blocks are keyed, as the engines are given
    it. Default: a key that everybody knows."""

    text_cache_memory: ByteSize = Field(ByteSize(128 * 1024 * 1024), ge=0)
    """Bytes for the token ids of beginnings that texts may share, as a growing conversation's do. 0 keeps none."""
