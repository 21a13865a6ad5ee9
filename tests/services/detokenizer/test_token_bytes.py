"""The bytes of each token, beside one decode of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer
from tests.services import small_tokenizers

KINDS = ["smollm2", "byte_level", "sentencepiece", "metaspace", "wordpiece", "many_added_tokens"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(request.param, tmp_path_factory.mktemp(request.param))


def load(kind: str, folder: Path) -> Tokenizer:
    if kind == "smollm2":
        return load_tokenizer(find_model("smollm2"))
    return load_tokenizer(small_tokenizers.save(getattr(small_tokenizers, kind)(), folder))


def joined(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool) -> bytes:
    token_bytes = DecoderFactory(tokenizer).token_bytes(skip_special_tokens=skip)
    shown = [token_id for token_id in ids if token_bytes[token_id]]
    return b"".join([*map(token_bytes.first, shown[:1]), *(token_bytes[token_id] for token_id in shown[1:])])


@given(data=st.data(), skip=st.booleans())
def test_bytes_of_tokens_join_to_their_text(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """A19, A20: as far as they are characters. Which other bytes become one U+FFFD is the decoder's own matter."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=12))
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in text:
        assert joined(tokenizer, ids, skip=skip) == text.encode()


@pytest.mark.parametrize("text", ["“quoted” text", "日本 👨‍👩‍👧‍👦!", "ďé"])
def test_bytes_of_a_texts_tokens_are_the_texts(text: str) -> None:
    """A19, A20."""
    tokenizer = load_tokenizer(find_model("smollm2"))
    assert joined(tokenizer, tokenizer.encode(text, add_special_tokens=False), skip=True) == text.encode()


def test_each_token_has_its_own_bytes_even_where_they_are_no_character(tmp_path: Path) -> None:
    """A19."""
    tokenizer = load("sentencepiece", tmp_path)
    token_bytes = DecoderFactory(tokenizer).token_bytes(skip_special_tokens=True)
    tokens = {"<0xE6>": b"\xe6", "▁": b" ", "▁ab": b" ab", "日": "日".encode(), "</s>": b"", "<t>": b"<t>"}
    ids = {token: tokenizer.backend.token_to_id(token) for token in tokens}
    assert {token: token_bytes[ids[token]] for token in tokens} == tokens
    assert token_bytes.first(ids["▁ab"]) == b"ab"
    assert token_bytes.first(ids["<0xE6>"]) == b"\xe6"


def test_special_token_has_bytes_where_it_is_shown() -> None:
    tokenizer = load_tokenizer(find_model("smollm2"))
    [im_end] = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    factory = DecoderFactory(tokenizer)
    assert factory.token_bytes(skip_special_tokens=False)[im_end] == b"<|im_end|>"
    assert factory.token_bytes(skip_special_tokens=True)[im_end] == b""
