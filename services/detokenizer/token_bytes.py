"""The bytes that each token of a vocabulary stands for. What all streams share is looked up once."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE_OF_CHAR = {char: byte for byte, char in bytes_to_unicode().items()}


class TokenBytes(Protocol):
    """Bytes by token id: what a token adds to a text. Hidden ids and ids without a token add none."""

    def __getitem__(self, token_id: int, /) -> bytes: ...

    def first(self, token_id: int) -> bytes:
        """Return what it adds to an empty text."""
        ...


class ByteLevelTokens(dict[int, bytes]):
    """Byte-level BPE: tokens are bytes, wherever they are."""

    def __init__(self, backend: Backend, hidden: Set[int]) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = hidden

    def first(self, token_id: int) -> bytes:
        return self[token_id]

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden else self._backend.id_to_token(token_id)
        self[token_id] = value = b"" if token is None else _byte_level(token)
        return value


def _byte_level(token: str) -> bytes:
    # Added tokens are written as they are, all others in an alphabet of one character a byte.
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


class DecodedTokens(dict[int, bytes]):
    """All other kinds: a byte token is its byte, any other the text that it adds after a token, here itself."""

    def __init__(self, backend: Backend, hidden: Set[int]) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = hidden
        self._byte_of = byte_tokens(backend)

    def first(self, token_id: int) -> bytes:
        text = self._decode(token_id, 1)
        return self[token_id] if token_id in self._byte_of and "\ufffd" in text else text.encode()

    def __missing__(self, token_id: int) -> bytes:
        value = self._byte_of.get(token_id)
        if value is None or token_id in self._hidden:
            value = self._decode(token_id, 2)[len(self._decode(token_id, 1)) :].encode()
        self[token_id] = value
        return value

    def _decode(self, token_id: int, count: int) -> str:
        return "" if token_id in self._hidden else self._backend.decode([token_id] * count, skip_special_tokens=False)


def byte_tokens(backend: Backend) -> dict[int, bytes]:
    """Return the bytes that tokens like `<0xE6>` stand for, by id; none if the decoder takes them for text."""
    if "ByteFallback" not in str(backend.decoder):
        return {}
    spellings = ((f"<0x{byte:{digits}}>", bytes([byte])) for byte in range(256) for digits in ("02X", "02x"))
    found = ((backend.token_to_id(token), value) for token, value in spellings)
    return {token_id: value for token_id, value in found if token_id is not None}
