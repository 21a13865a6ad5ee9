"""A model's tokenizer, loaded without torch: the services that use it have none."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from kvern.services.runtime.errors import InvalidArgument
from kvern.services.runtime.gguf_metadata import read_gguf_metadata
from kvern.services.runtime.model_source import ModelSource

_FINGERPRINT_BYTES = 16

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)

_GPT2_SPLITS = frozenset({None, "default", "gpt-2", "olmo", "mpt", "smollm"})
"""Values of tokenizer.ggml.pre that transformers splits as GPT-2 did. It takes any name it does not know for one."""

_GGUF_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class TokenizerError(Exception):
    """A model's tokenizer cannot be loaded. The message names the model's path and what is wrong."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer and what the services need to know of it. Threads may share it."""

    transformers: PreTrainedTokenizerFast
    """For its chat template. Its own encode and decode change the backend's state: threads must not call them."""
    vocab_size: int
    """Ids are below this."""
    special_ids: frozenset[int]
    """Ids that are not turned into text where special tokens are skipped."""
    fingerprint: str
    """Hash over the tokenizer's files, in hex."""

    @property
    def backend(self) -> Backend:
        return self.transformers.backend_tokenizer  # type: ignore[no-any-return]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's ids. Control tokens written in it are control tokens."""
        # As a batch, it releases the GIL.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids. Ids the tokenizer does not know have none."""
        texts = self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidArgument for the first id that the vocabulary does not have."""
    if not token_ids or max(token_ids) < vocab_size:
        return
    index, token_id = next((i, id) for i, id in enumerate(token_ids) if id >= vocab_size)
    raise InvalidArgument(f"{field}[{index}]", f"must be below the vocabulary's size, {vocab_size}, got {token_id}")


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Load a model's tokenizer from a Hugging Face directory or a .gguf file. Raises TokenizerError."""
    try:
        loaded, fingerprint = _from_gguf(source.path) if source.is_gguf else _from_directory(source.path)
    except Exception as error:  # what transformers and tokenizers raise on damaged files has no common base
        raise TokenizerError(f"model: cannot load the tokenizer of {source.path}: {error}") from error
    backend = loaded.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(
        transformers=loaded,
        vocab_size=max(backend.get_vocab().values()) + 1,
        special_ids=frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special),
        fingerprint=fingerprint,
    )


def _from_directory(path: Path) -> tuple[PreTrainedTokenizerFast, str]:
    files = ((name, (path / name).read_bytes()) for name in _TOKENIZER_FILES if (path / name).is_file())
    fingerprint = _fingerprint(files)
    if (path / "tokenizer.json").is_file():
        # It says all there is to say. AutoTokenizer would import torch, where there is one, to find a class for it.
        return PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False), fingerprint
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise ValueError(f"{type(loaded).__name__} has no fast tokenizer; a tokenizer.json would do")
    return loaded, fingerprint


def _from_gguf(path: Path) -> tuple[PreTrainedTokenizerFast, str]:
    """Do what AutoTokenizer does with a gguf_file, which needs torch only to read the file."""
    metadata = read_gguf_metadata(path)
    parts = {
        group: {name: metadata[f"tokenizer.{key}"] for key, name in keys.items() if f"tokenizer.{key}" in metadata}
        for group, keys in GGUF_TOKENIZER_MAPPING.items()
    }
    vocabulary, config = parts["tokenizer"], parts["tokenizer_config"]
    if "tokens" not in vocabulary:
        raise ValueError("the file holds no tokenizer")
    _check_pre_tokenizer(vocabulary)
    if vocabulary.get("tokenizer_type") == "llama":
        config.setdefault("add_bos_token", True)  # as llama.cpp, where the file does not say
    for name, key in _GGUF_SPECIAL_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        config[name] = None if token_id is None else vocabulary["tokens"][token_id]
    backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], vocabulary)
    if vocabulary.get("pre_tokenizer_type") == "smollm":
        # The model's own tokenizer splits off each digit first, which transformers' conversion leaves out.
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    fingerprint = _fingerprint((group, json.dumps(values, sort_keys=True).encode()) for group, values in parts.items())
    return PreTrainedTokenizerFast(tokenizer_object=backend, **config), fingerprint


def _check_pre_tokenizer(vocabulary: dict[str, Any]) -> None:
    name = vocabulary.get("pre_tokenizer_type")
    if vocabulary.get("tokenizer_type") == "gpt2" and name not in GGUF_PRE_TOKENIZER_SPLITS.keys() | _GPT2_SPLITS:
        raise ValueError(f"its pre-tokenizer {name!r} is not known; the model's Hugging Face folder would do")


def _fingerprint(fields: Iterable[tuple[str, bytes]]) -> str:
    state = hashlib.blake2b(digest_size=_FINGERPRINT_BYTES)
    for name, data in fields:
        for part in (name.encode(), data):
            state.update(struct.pack("<Q", len(part)) + part)
    return state.hexdigest()
