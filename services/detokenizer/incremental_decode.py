"""Token ids to text as they come: whole characters only, and all deltas joined are what one decode of all ids gives."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from typing import Protocol, Self

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from kvern.services.detokenizer.special_tokens import SpecialTokens
from kvern.services.detokenizer.token_bytes import ByteLevelTokens, DecodedTokens, TokenBytes, byte_tokens
from kvern.services.runtime.text import Tokenizer, TokenizerError

MAX_RUN = 256
"""Byte tokens in a row that are held back while they are valid UTF-8. One decode of all would replace them too if an
invalid one came later in the row; beyond this many, what is shown is shown."""


class IncrementalDecoder(Protocol):
    """Decodes one stream of token ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids add and that no later id can change."""
        ...

    def finish(self) -> str:
        """Return the rest, now that no id follows: a character left incomplete is U+FFFD."""
        ...

    def copy(self) -> Self:
        """Return a decoder that goes on from the same state."""
        ...


class DecoderFactory:
    """Makes the decoders of one tokenizer's streams. What they share is looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = tokenizer.backend
        self.special_tokens = SpecialTokens(tokenizer)
        self._is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        if not self._is_byte_level and "ByteLevel" in str(backend.decoder):
            raise TokenizerError(f"model: the tokenizer's decoder is of no known kind: {backend.decoder}")
        hidden_ids: tuple[Set[int], Set[int]] = (frozenset(), tokenizer.special_ids)
        if self._is_byte_level:
            self._byte_level = [ByteLevelTokens(backend, hidden) for hidden in hidden_ids]
        else:
            self._decoded = [DecodedTokens(backend, hidden) for hidden in hidden_ids]
            self._vocabularies = [_Vocabulary(backend, hidden) for hidden in hidden_ids]

    def create(self, *, skip_special_tokens: bool) -> IncrementalDecoder:
        if self._is_byte_level:
            return _ByteLevelDecoder(self._byte_level[skip_special_tokens])
        return _WindowDecoder(self._vocabularies[skip_special_tokens])

    def token_bytes(self, *, skip_special_tokens: bool) -> TokenBytes:
        return (self._byte_level if self._is_byte_level else self._decoded)[skip_special_tokens]


class _ByteLevelDecoder:
    """Byte-level BPE: tokens are bytes, so the text is their UTF-8. State: the bytes of one incomplete character."""

    def __init__(self, token_bytes: ByteLevelTokens) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        token_bytes = self._token_bytes
        return self._utf8.decode(b"".join([token_bytes[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def copy(self) -> _ByteLevelDecoder:
        copied = _ByteLevelDecoder(self._token_bytes)
        copied._utf8.setstate(self._utf8.getstate())
        return copied


class _Vocabulary:
    """What the streams of a vocabulary that is not byte-level share."""

    def __init__(self, backend: Backend, hidden: Set[int]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._shown: dict[int, bool] = {}
        self._alone: dict[int, str] = {}
        self.byte_of = byte_tokens(backend)
        text_ids = (id for id in range(backend.get_vocab_size()) if self.shows(id) and id not in self.byte_of)
        self.any_text_id = next((id for id in text_ids if self.decode_alone(id)), None)
        """A token that is text, if there is one."""

    def shows(self, token_id: int) -> bool:
        """Whether there is such a token, and it is not skipped."""
        shown = self._shown.get(token_id)
        if shown is None:
            shown = token_id not in self._hidden and self._backend.id_to_token(token_id) is not None
            self._shown[token_id] = shown
        return shown

    def decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def decode_alone(self, token_id: int) -> str:
        text = self._alone.get(token_id)
        if text is None:
            self._alone[token_id] = text = self.decode([token_id])
        return text


class _Run:
    """Byte tokens in a row: whether they can still become UTF-8 as a whole."""

    def __init__(self) -> None:
        self.length = 0
        self.is_invalid = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    @property
    def num_incomplete(self) -> int:
        """Bytes of the character that the run ends in the middle of."""
        return len(self._utf8.getstate()[0])

    def push(self, byte: bytes) -> None:
        self.length += 1
        try:
            self._utf8.decode(byte)
        except UnicodeDecodeError:
            self.is_invalid = True

    def end(self) -> None:
        if self.length:
            self.length = 0
            self.is_invalid = False
            self._utf8.reset()

    def copy(self) -> _Run:
        copied = _Run()
        copied.length, copied.is_invalid = self.length, self.is_invalid
        copied._utf8.setstate(self._utf8.getstate())
        return copied


class _WindowDecoder:
    """All other kinds: what ids add is the difference between decoding them after a token sent, and that alone.

    One token of context is enough: decoders treat only the first token of all otherwise (SentencePiece drops the space
    before it). A run of byte tokens (`<0xE6>`) is valid or replaced as a whole, so it is held back until a token of
    another kind ends it or nothing can make it valid any more. State: that run.
    """

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._context: int | None = None
        self._pending: list[int] = []
        self._run = _Run()

    def push(self, token_ids: Sequence[int]) -> str:
        vocabulary, text, end_of_text = self._vocabulary, "", 0
        for token_id in token_ids:
            if not vocabulary.shows(token_id):
                continue
            byte = vocabulary.byte_of.get(token_id)
            if byte is None:
                self._run.end()
                self._pending.append(token_id)
                end_of_text = len(self._pending)
            elif (final := self._push_byte(token_id, byte)) is not None:
                text += final
                end_of_text = 0
        return text + self._take(end_of_text)

    def finish(self) -> str:
        return self._take(len(self._pending))

    def copy(self) -> _WindowDecoder:
        copied = _WindowDecoder(self._vocabulary)
        copied._context, copied._pending, copied._run = self._context, self._pending.copy(), self._run.copy()
        return copied

    def _push_byte(self, token_id: int, byte: bytes) -> str | None:
        """Return what is final now, all that was pending before the run included; None if nothing is."""
        run = self._run
        if run.is_invalid:
            return "\ufffd"
        self._pending.append(token_id)
        run.push(byte)
        if run.is_invalid:
            return self._take(len(self._pending))
        if run.length > MAX_RUN:
            run.length = run.num_incomplete
            return self._take(len(self._pending) - run.num_incomplete)
        return None

    def _take(self, count: int) -> str:
        """Decode the first `count` pending ids."""
        taken = self._pending[:count]
        if not taken:
            return ""
        vocabulary = self._vocabulary
        if self._context is None:
            text = vocabulary.decode(taken)
        else:
            text = vocabulary.decode([self._context, *taken])[len(vocabulary.decode_alone(self._context)) :]
        if text:
            # A byte token as context would be taken for a part of the next run.
            self._context = vocabulary.any_text_id if taken[-1] in vocabulary.byte_of else taken[-1]
            del self._pending[:count]
        return text
