"""End-of-sequence token ids of a Hugging Face directory: the union of what its files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvern.engine.model.json_file import read_json_if_any

_ID_FILES = ("config.json", "generation_config.json")
_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def eos_token_ids(directory: Path) -> frozenset[int]:
    """Return the ids in config.json and generation_config.json, and those of the tokens in the tokenizer's files.

    Raises ModelError where one of them is damaged.
    """
    ids: set[int] = set()
    for name in _ID_FILES:
        ids.update(_as_ids(read_json_if_any(directory / name).get("eos_token_id")))
    tokens = {_content(read_json_if_any(directory / name).get("eos_token")) for name in _TOKEN_FILES}
    ids.update(_ids_of_tokens(directory, {token for token in tokens if token is not None}))
    return frozenset(ids)


def _as_ids(value: Any) -> list[int]:
    """Return what is an id in a field that may hold one, several, or none."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def _content(token: Any) -> str | None:
    """Return the text of a token that is written as a string or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _ids_of_tokens(directory: Path, tokens: set[str]) -> set[int]:
    """Look tokens up where the tokenizer's files list them, the short lists before the vocabulary."""
    if not tokens:
        return set()
    decoder = read_json_if_any(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
    found = {_content(token): int(token_id) for token_id, token in decoder.items()}
    if not tokens <= found.keys():
        found |= _vocabulary(read_json_if_any(directory / "tokenizer.json"))
    return {found[token] for token in tokens & found.keys()}


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str | None, int]:
    """Return the tokens of a tokenizer.json. A unigram model lists pairs in the order of their ids."""
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        vocabulary = {token: token_id for token_id, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}}
