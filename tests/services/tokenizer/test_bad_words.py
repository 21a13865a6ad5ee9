"""Bad words as token sequences: what completes none of them never writes the word where a word begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer
from kvern.services.tokenizer.bad_words import encode_bad_words
from kvern.services.tokenizer.prefix_cache import PrefixCache
from kvern.services.tokenizer.prompt import PromptEncoder
from kvern.v1 import inference_pb2, tokenizer_pb2
from tests.services import small_tokenizers


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(find_model("smollm2"))


def sequences(tokenizer: Tokenizer, *words: str) -> list[tuple[int, ...]]:
    return [tuple(word.ids) for word in encode_bad_words(tokenizer, words)]


def is_ruled_out(text: str, tokenizer: Tokenizer, *words: str) -> bool:
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    return any(ids[i : i + len(word)] == word for word in sequences(tokenizer, *words) for i in range(len(ids)))


def test_word_is_ruled_out_at_the_beginning_and_after_a_space(tokenizer: Tokenizer) -> None:
    assert is_ruled_out("banana", tokenizer, "banana")
    assert is_ruled_out("I like a banana, really", tokenizer, "banana")
    assert is_ruled_out("an unlikely_word here", tokenizer, "unlikely_word")
    assert not is_ruled_out("I like an apple", tokenizer, "banana", "unlikely_word")


def test_each_sequence_comes_once_and_none_is_empty(tokenizer: Tokenizer) -> None:
    found = sequences(tokenizer, "banana", "banana", "apple")
    assert len(found) == len(set(found)) == 4
    assert all(found)


@pytest.mark.parametrize("backend", [small_tokenizers.sentencepiece(), small_tokenizers.metaspace()])
def test_word_is_ruled_out_where_the_tokenizer_puts_a_space_before_text(backend: Backend, tmp_path: Path) -> None:
    loaded = load_tokenizer(small_tokenizers.save(backend, tmp_path))
    assert is_ruled_out("ab", loaded, "ab")
    assert is_ruled_out("a ab", loaded, "ab")


def test_prompt_response_carries_them(tokenizer: Tokenizer) -> None:
    request = tokenizer_pb2.EncodePromptRequest(token_ids=inference_pb2.TokenIds(ids=[5]), bad_words=["banana"])
    response = PromptEncoder(tokenizer, PrefixCache(1 << 20)).encode(request)
    assert [tuple(word.ids) for word in response.bad_words] == sequences(tokenizer, "banana")
