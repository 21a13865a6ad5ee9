from __future__ import annotations

import pytest

from kvern.services.detokenizer.choice import Choice
from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.detokenizer.stop_strings import StopStringMatcher
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(find_model("smollm2"))


def new_choice(tokenizer: Tokenizer, *stops: str, min_tokens: int = 0) -> Choice:
    decoder = DecoderFactory(tokenizer).create(skip_special_tokens=True)
    return Choice(0, decoder, StopStringMatcher(stops, include_stop=False), min_tokens)


def test_text_held_back_comes_before_the_character_left_incomplete(tokenizer: Tokenizer) -> None:
    choice = new_choice(tokenizer, "a stop")
    [letter] = tokenizer.encode("a", add_special_tokens=False)
    first_byte = tokenizer.encode("😀", add_special_tokens=False)[0]
    assert choice.push([letter, first_byte]) == ""
    assert choice.finish() == "a\ufffd"


def test_stop_string_that_only_the_end_completes_is_matched(tokenizer: Tokenizer) -> None:
    choice = new_choice(tokenizer, "a\ufffd")
    ids = tokenizer.encode("ba😀", add_special_tokens=False)
    assert choice.push(ids[:2]) == "b"
    assert choice.finish() == ""
    assert choice.matched_stop == "a\ufffd"


def test_tokens_after_a_match_do_not_count(tokenizer: Tokenizer) -> None:
    """A24: nor does another choice of the same request notice."""
    choice, other = new_choice(tokenizer, " two"), new_choice(tokenizer, " two")
    ids = tokenizer.encode(" one two three", add_special_tokens=False)
    assert other.push(ids[:1]) == " one"
    assert choice.push(ids) == " one"
    choice.push_hidden(2)
    assert (choice.num_tokens, choice.unsent_ids, choice.finish()) == (2, ids[:2], "")
    assert (other.num_tokens, other.matched_stop) == (1, None)


@pytest.mark.parametrize(("min_tokens", "shown"), [(0, " one"), (2, " one"), (3, " one two three")])
def test_stop_string_complete_before_min_tokens_is_text(tokenizer: Tokenizer, min_tokens: int, shown: str) -> None:
    choice = new_choice(tokenizer, " two", min_tokens=min_tokens)
    ids = tokenizer.encode(" one two three two four", add_special_tokens=False)
    assert len(ids) == 5
    assert choice.push(ids) == shown
    assert choice.matched_stop == " two"
