"""Bad words as token sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvern.services.runtime.text import Tokenizer
from kvern.v1 import inference_pb2


def encode_bad_words(tokenizer: Tokenizer, words: Iterable[str]) -> list[inference_pb2.TokenIds]:
    """Return the sequences that write each word, as a text begins and after a space, each once.

    A tokenizer may also write a word as a part of longer tokens or in smaller pieces: that is not kept from happening.
    """
    sequences = dict.fromkeys(ids for word in words for ids in _spellings(tokenizer, word) if ids)
    return [inference_pb2.TokenIds(ids=ids) for ids in sequences]


def _spellings(tokenizer: Tokenizer, word: str) -> Iterator[tuple[int, ...]]:
    plain = tuple(tokenizer.encode(word, add_special_tokens=False))
    yield plain
    after_space = tuple(tokenizer.encode(" " + word, add_special_tokens=False))
    if after_space[-len(plain) :] != plain:  # or it is ruled out with the plain one
        yield after_space
