"""The files by which SMG knows a model: its tokenizer's and its configuration's, in one archive."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvern.services.runtime.gguf_metadata import read_gguf_metadata
from kvern.services.runtime.model_source import ModelSource
from kvern.services.runtime.text import Tokenizer

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is sent, and what of it is asked for again and again."""

    archive: bytes
    """A zip, the same bytes for the same files."""
    sha256: str
    """Of the archive, in hex."""
    config: Mapping[str, Any]
    """config.json."""


def read_model_files(source: ModelSource, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> ModelFiles:
    """Read a model's files, or make those that it does not have. Takes a second, and needs no loop.

    eos_token_ids: for a generation_config.json, where the model has none.
    """
    files = _tokenizer_files(source, tokenizer)
    config = _read_json(source, _CONFIG) or _config(source, tokenizer)
    files[_CONFIG] = _to_json(config)
    generation = _read_json(source, _GENERATION_CONFIG) or {"eos_token_id": list(eos_token_ids)}
    files[_GENERATION_CONFIG] = _to_json(generation)
    archive = _zip(files)
    return ModelFiles(archive, hashlib.sha256(archive).hexdigest(), config)


def _tokenizer_files(source: ModelSource, tokenizer: Tokenizer) -> dict[str, bytes]:
    if not source.is_gguf and (source.path / _TOKENIZER_FILES[0]).is_file():
        return _read(source.path)
    with TemporaryDirectory() as folder:
        tokenizer.transformers.save_pretrained(folder)
        return _read(Path(folder))


def _read(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in _TOKENIZER_FILES if (folder / name).is_file()}


def _read_json(source: ModelSource, name: str) -> dict[str, Any]:
    path = source.path / name
    return dict(json.loads(path.read_bytes())) if not source.is_gguf and path.is_file() else {}


def _config(source: ModelSource, tokenizer: Tokenizer) -> dict[str, Any]:
    """Say of a .gguf what gateways ask a config.json for."""
    metadata = read_gguf_metadata(source.path)
    architecture = metadata["general.architecture"]
    return {
        "model_type": architecture,
        "max_position_embeddings": metadata.get(f"{architecture}.context_length"),
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.transformers.bos_token_id,
        "eos_token_id": tokenizer.transformers.eos_token_id,
        "pad_token_id": tokenizer.transformers.pad_token_id,
    }


def _to_json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2).encode()


def _zip(files: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
        for name, data in files.items():
            # A ZipInfo has a fixed time, so that replicas of one model agree on the sum.
            writer.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return archive.getvalue()
