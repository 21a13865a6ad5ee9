"""Token ids to text as they come: whole characters only, and all deltas joined are what one decode of all ids gives."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvern.services.runtime.text import Tokenizer, TokenizerError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

_BYTE_OF_CHAR = {char: byte for byte, char in bytes_to_unicode().items()}


class IncrementalDecoder(Protocol):
    """Decodes one stream of token ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids add and that no later id can change."""
        ...

    def finish(self) -> str:
        """Return the rest, now that no id follows: a character left incomplete is U+FFFD."""
        ...


class DecoderFactory:
    """Makes the decoders of one tokenizer's streams. What they share is looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._special_ids = tokenizer.special_ids
        self._is_byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)
        if not self._is_byte_level and "ByteLevel" in str(self._backend.decoder):
            raise TokenizerError(f"model: the tokenizer's decoder is of no known kind: {self._backend.decoder}")
        self._bytes_with_special = _TokenBytes(self._backend, hidden=frozenset())
        self._bytes_without_special = _TokenBytes(self._backend, hidden=self._special_ids)

    def create(self, *, skip_special_tokens: bool) -> IncrementalDecoder:
        if self._is_byte_level:
            return _ByteLevelDecoder(self._bytes_without_special if skip_special_tokens else self._bytes_with_special)
        return _WindowDecoder(self._backend, self._special_ids if skip_special_tokens else frozenset())


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token of a byte-level vocabulary, filled as they are asked for. Hidden ids have none."""

    def __init__(self, backend: Backend, hidden: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden else self._backend.id_to_token(token_id)
        self[token_id] = value = b"" if token is None else _token_bytes(token)
        return value


def _token_bytes(token: str) -> bytes:
    # Added tokens are written as they are, all others in an alphabet of one character a byte.
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


class _ByteLevelDecoder:
    """Byte-level BPE: tokens are bytes, so the text is their UTF-8. State: the bytes of one incomplete character."""

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        token_bytes = self._token_bytes
        return self._utf8.decode(b"".join([token_bytes[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """All other kinds: what ids add is the difference between decoding them after the last token sent, and that alone.

    One token of context is enough: decoders treat only the first token of all otherwise (SentencePiece drops the space
    before it). A run of byte tokens (`<0xE6>`) is valid or replaced as a whole, so it is held back until a token of
    another kind ends it. State: that run.
    """

    def __init__(self, backend: Backend, hidden: frozenset[int]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        end_of_text = 0
        for token_id in token_ids:
            token = None if token_id in self._hidden else self._backend.id_to_token(token_id)
            if token is not None:
                self._pending.append(token_id)
                if _BYTE_TOKEN.fullmatch(token) is None:
                    end_of_text = len(self._pending)
        return self._take(end_of_text) if end_of_text > 0 else ""

    def finish(self) -> str:
        return self._take(len(self._pending))

    def _take(self, count: int) -> str:
        """Decode the first `count` pending ids."""
        text = self._decode(self._context + self._pending[:count])[len(self._context_text) :]
        if text:
            self._context = self._pending[count - 1 : count]
            self._context_text = self._decode(self._context)
            del self._pending[:count]
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)
