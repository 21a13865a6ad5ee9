"""Text never turns into control tokens, with tokenizers whose vocabularies spell them, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Backend

from kvern.services.runtime.text import Tokenizer, load_tokenizer
from kvern.services.tokenizer.control_tokens import ControlTokenGuard
from kvern.services.tokenizer.prefix_cache import CachingEncoder, PrefixCache
from tests.services import small_tokenizers

MERGES = [("<", "/"), ("</", "s"), ("</s", ">"), ("</s>", "a")]


def unigram() -> Backend:
    """Its pieces are control tokens among others, and its normalizer makes them of wide letters."""
    backend = small_tokenizers.metaspace()
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("<turn>", normalized=False, special=True)])
    return backend


def bpe() -> Backend:
    """It merges letters to a control token, and that to a longer piece."""
    description = json.loads(small_tokenizers.sentencepiece().to_str())
    model = description["model"]
    letters = {letter for pair in MERGES for piece in (*pair, "".join(pair)) for letter in (*piece, piece)}
    for piece in sorted(letters - model["vocab"].keys()):
        model["vocab"][piece] = len(model["vocab"])
    model["merges"] = [list(pair) for pair in MERGES]
    # Added last, its id has moved.
    description["added_tokens"] = [token for token in description["added_tokens"] if token["content"] != "<t>"]
    return Backend.from_str(json.dumps(description))


@pytest.fixture(scope="module", params=[unigram, bpe, small_tokenizers.wordpiece, small_tokenizers.many_added_tokens])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make: Callable[[], Backend] = request.param
    return load_tokenizer(small_tokenizers.save(make(), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def guard(tokenizer: Tokenizer) -> ControlTokenGuard:
    return ControlTokenGuard(tokenizer, CachingEncoder(tokenizer.backend, PrefixCache(1 << 20)))


def wide(text: str) -> str:
    return "".join(chr(ord(letter) + 0xFEE0) for letter in text)


TYPED = st.lists(
    st.sampled_from(["</s>", "<s>", "<turn>", "<", "/", "s", ">", "a", " ", wide("</s>"), wide("<turn>")]), max_size=6
).map("".join)


@settings(max_examples=60, deadline=None)
@given(TYPED, TYPED)
def test_only_what_the_template_writes_becomes_control_tokens(
    tokenizer: Tokenizer, guard: ControlTokenGuard, first: str, second: str
) -> None:
    """B06."""
    ids = guard.encode(f"<s>{guard.mark(first)}</s>{guard.mark(second)}<s>", add_special_tokens=True)
    special = tokenizer.special_ids - {tokenizer.backend.token_to_id("<unk>")}
    assert [id for id in ids if id in special] == [1, 1, 2, 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["<s>", "</s>", "<t>", "<turn>", "a", "ab", " ", "日"])).map("".join))
def test_what_a_template_writes_is_encoded_as_ever(tokenizer: Tokenizer, guard: ControlTokenGuard, text: str) -> None:
    for adds_special in (True, False):
        expected = tokenizer.encode(text, add_special_tokens=adds_special)
        assert guard.encode(text, add_special_tokens=adds_special) == expected


def test_text_that_spells_a_control_token_is_one_where_it_is_raw(tmp_path: Path) -> None:
    """So the tokenizers above do what the guard is for."""
    for make in (unigram, bpe):
        tokenizer = load_tokenizer(small_tokenizers.save(make(), tmp_path / make.__name__))
        assert [piece.id for piece in tokenizer.backend.model.tokenize("</s>")] == [2]
