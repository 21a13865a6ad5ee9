"""Long texts that grow, such as conversations, without encoding their beginnings again.

A tokenizer looks for added tokens first. What lies between two of them is normalized, split and encoded apart from all
else. So a text can be cut in front of an added token that is sure to be found there, and the ids of the parts, joined,
are those of the whole. A chat's template writes such tokens around every message.
"""

from __future__ import annotations

import re
import string
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from typing import Self

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from kvern.services.tokenizer.literals import any_of

MIN_PART_CHARS = 1024
"""Of all parts but the last. Shorter ones would cost more than encoding them."""

ENTRY_BYTES = 320
"""What an entry takes beside its text and its ids, measured."""

_NO_WORD = frozenset(string.punctuation) - {"_"}

_Key = tuple[object, str]
"""What may share an entry, and the text."""


class PrefixCache:
    """The ids of parts of texts, up to a number of bytes. The least recently used go first. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.lookup_bytes = 0
        """Bytes of all texts that were looked for, in UTF-8."""
        self.hit_bytes = 0
        """Of those, bytes of texts that were there."""
        self._max_bytes = max_bytes
        self._parts: OrderedDict[_Key, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key) -> array[int] | None:
        text_bytes = len(key[1].encode(errors="surrogatepass"))
        with self._lock:
            self.lookup_bytes += text_bytes
            ids = self._parts.get(key)
            if ids is not None:
                self.hit_bytes += text_bytes
                self._parts.move_to_end(key)
            return ids

    def put(self, key: _Key, ids: array[int]) -> None:
        num_bytes = _num_bytes(key, ids)
        with self._lock:
            if key in self._parts or num_bytes > self._max_bytes:
                return
            self._parts[key] = ids
            self.num_bytes += num_bytes
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _num_bytes(*self._parts.popitem(last=False))


def _num_bytes(key: _Key, ids: array[int]) -> int:
    return sys.getsizeof(key[1]) + len(ids) * ids.itemsize + ENTRY_BYTES


class CachingEncoder:
    """Encodes with one tokenizer, as that does itself. Threads may share it."""

    def __init__(self, backend: Backend, cache: PrefixCache, renumbered: Mapping[int, int] | None = None) -> None:
        """renumbered: other ids to return for some of the tokenizer's."""
        self.backend = backend
        self.renumbered = renumbered or {}
        self._cache = cache
        self._cuts: re.Pattern[str] | None = None
        tokens = cut_tokens(backend)
        if tokens:
            self._cuts = any_of(tokens)
            self._before, self._after = _special_tokens_around(tokens[0], backend)

    def for_backend(self, backend: Backend, renumbered: Mapping[int, int]) -> Self:
        """Return an encoder for another tokenizer with the same cache, in which the two share nothing but the room."""
        return type(self)(backend, self._cache, renumbered)

    def encode(self, text: str, *, add_special_tokens: bool, scope: str = "") -> list[int]:
        """Return a text's ids. Control tokens written in it are control tokens.

        scope: what was encoded in another one is not found: how long this takes tells nothing of what others sent.
        """
        if self._cuts is None:
            return self._encode(text, add_special_tokens=add_special_tokens)
        # The last part is what will have grown when the text comes again.
        *parts, last = _split(text, self._cuts)
        token_ids: list[int] = []
        for part in parts:
            token_ids.extend(self._encode_cached(part, scope))
        token_ids += self._encode(last, add_special_tokens=False)
        return [*self._before, *token_ids, *self._after] if add_special_tokens else token_ids

    def _encode_cached(self, part: str, scope: str) -> array[int]:
        key = ((self, scope), part)
        token_ids = self._cache.get(key)
        if token_ids is None:
            token_ids = array("I", self._encode(part, add_special_tokens=False))
            self._cache.put(key, token_ids)
        return token_ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # As a batch, it releases the GIL.
        token_ids = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return [self.renumbered.get(id, id) for id in token_ids] if self.renumbered else token_ids


def cut_tokens(backend: Backend) -> list[str]:
    """Return the added tokens in front of which a text can be cut, wherever they are written; none for some tokenizers.

    The tokenizer searches for added tokens that are not normalized from left to right in the text as it is, and takes
    the longest of those that begin at a place. It finds each one written of these, because none is a part of another
    one, and where one begins, no other one can be unfinished. And what comes before is treated as at a text's end: the
    token claims no spaces there, and begins with a character that is no space and belongs to no word, by which an added
    token before it might be judged.
    """
    if backend.encode_special_tokens or _draws_at_random(backend):
        return []
    searched = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
    contents = [token.content for token in searched]
    joined = "\0".join(contents)
    endings = {content[start:] for content in contents for start in range(1, len(content))}
    return [
        token.content
        for token in searched
        if _is_judged_alone(token)
        and joined.count(token.content) == 1
        and endings.isdisjoint(token.content[:end] for end in range(1, len(token.content)))
    ]


def _is_judged_alone(token: AddedToken) -> bool:
    return not token.lstrip and not token.single_word and token.content[0] in _NO_WORD


def _draws_at_random(backend: Backend) -> bool:
    """Whether it splits one text in several ways, as tokenizers do to train a model."""
    return bool(getattr(backend.model, "dropout", None) or getattr(backend.model, "alpha", None))


def _special_tokens_around(token: str, backend: Backend) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a text. They do not depend on it."""
    encoding = backend.encode(token)
    place = encoding.special_tokens_mask.index(0)
    return encoding.ids[:place], encoding.ids[place + 1 :]


def _split(text: str, cuts: re.Pattern[str]) -> list[str]:
    """Cut a text so that a longer one that begins with it is cut at the same places first."""
    parts, start = [], 0
    while cut := cuts.search(text, start + MIN_PART_CHARS):
        parts.append(text[start : cut.start()])
        start = cut.start()
    return [*parts, text[start:]]
