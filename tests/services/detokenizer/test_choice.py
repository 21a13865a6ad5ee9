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


def new_choice(tokenizer: Tokenizer, *stops: str, min_tokens: int = 0, include_stop: bool = False) -> Choice:
    """One that does not show special tokens."""
    factory = DecoderFactory(tokenizer)
    marks = factory.special_tokens.mark(stops)
    matcher = StopStringMatcher(stops, include_stop=include_stop, marks=marks)
    return Choice(0, factory.create(skip_special_tokens=True), matcher, min_tokens=min_tokens)


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


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown", "shown_of_stop"),
    [
        ("<|im_end|>", "one two", ""),
        (" two<|im_end|>", "one", " two"),
        ("two<|im_end|>\n<|im_start|>user", "one ", "two\nuser"),
    ],
)
def test_special_token_that_is_not_shown_stops_where_a_stop_string_names_it(
    tokenizer: Tokenizer, stop: str, shown: str, shown_of_stop: str, include_stop: bool
) -> None:
    """A07: with `include_stop`, too, its own text is not shown."""
    ids = tokenizer.encode("one two<|im_end|>\n<|im_start|>user\nmore", add_special_tokens=False)
    for cut in range(1, len(ids)):
        choice = new_choice(tokenizer, stop, "never", include_stop=include_stop)
        text = "".join(choice.push(ids[start : start + cut]) for start in range(0, len(ids), cut))
        assert text + choice.finish() == shown + (shown_of_stop if include_stop else "")
        assert choice.matched_stop == stop


def test_special_token_written_in_other_tokens_stops_as_text(tokenizer: Tokenizer) -> None:
    """A07."""
    choice = new_choice(tokenizer, "<|im_end|>")
    ids = [id for piece in ("a<", "|im", "_end", "|>b") for id in tokenizer.encode(piece, add_special_tokens=False)]
    assert choice.push(ids) == "a"
    assert choice.matched_stop == "<|im_end|>"


def test_special_token_before_min_tokens_stops_nothing(tokenizer: Tokenizer) -> None:
    """A07, A16."""
    choice = new_choice(tokenizer, "<|im_end|>", min_tokens=4)
    ids = tokenizer.encode("one<|im_end|> two<|im_end|> three", add_special_tokens=False)
    assert choice.push(ids) == "one two"
    assert (choice.num_tokens, choice.matched_stop) == (4, "<|im_end|>")


def test_stop_token_that_is_also_a_stop_string_counts_as_that(tokenizer: Tokenizer) -> None:
    """A07."""
    choice = new_choice(tokenizer, " two<|im_end|>")
    *ids, im_end = tokenizer.encode("one two<|im_end|>", add_special_tokens=False)
    assert choice.push(ids) + choice.push_hidden(im_end) + choice.finish() == "one"
    assert (choice.num_tokens, choice.matched_stop) == (3, " two<|im_end|>")


def test_stop_string_within_shown_text_is_found_across_a_special_token(tokenizer: Tokenizer) -> None:
    """One that no stop string names is nothing to the search."""
    choice = new_choice(tokenizer, "ab")
    ids = tokenizer.encode("xa<|im_end|>b", add_special_tokens=False)
    assert choice.push(ids) == "x"
