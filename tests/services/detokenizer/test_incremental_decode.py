"""Deltas joined are what one decode of all ids gives, wherever the stream is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from kvern.services.detokenizer.incremental_decode import MAX_RUN, DecoderFactory, IncrementalDecoder
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, TokenizerError, load_tokenizer
from tests.services import small_tokenizers

FAMILY = "👨‍👩‍👧‍👦"


class Streams:
    """One tokenizer, its decoders, and one decode of everything to compare with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.factory = DecoderFactory(tokenizer)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def id(self, token: str) -> int:
        found = self.tokenizer.backend.token_to_id(token)
        assert found is not None, token
        return found

    def deltas(self, ids: Sequence[int], *, skip: bool = True, cut: int = 1) -> list[str]:
        decoder: IncrementalDecoder = self.factory.create(skip_special_tokens=skip)
        pieces = [decoder.push(ids[start : start + cut]) for start in range(0, len(ids), cut)]
        return [*pieces, decoder.finish()]

    def whole(self, ids: Sequence[int], *, skip: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip)

    def check(self, ids: Sequence[int], *, skip: bool, cut: int) -> None:
        deltas = self.deltas(ids, skip=skip, cut=cut)
        assert "".join(deltas) == self.whole(ids, skip=skip)
        for delta in deltas:
            delta.encode()  # raises for half a character


@pytest.fixture(scope="module")
def smollm2() -> Streams:
    return Streams(load_tokenizer(find_model("smollm2")))


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "metaspace", "wordpiece", "many_added_tokens"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Streams:
    make: Callable[[], Backend] = getattr(small_tokenizers, request.param)
    return Streams(load_tokenizer(small_tokenizers.save(make(), tmp_path_factory.mktemp(request.param))))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Streams:
    source = small_tokenizers.save(small_tokenizers.sentencepiece(), tmp_path_factory.mktemp("sentencepiece"))
    return Streams(load_tokenizer(source))


@given(text=st.text(max_size=60), cut=st.integers(1, 5))
def test_deltas_of_any_text_join_to_one_decode(smollm2: Streams, text: str, cut: int) -> None:
    """A02, A04. (Its vocabulary lacks some bytes, so a few characters do not come back at all.)"""
    smollm2.check(smollm2.ids(text), skip=False, cut=cut)


@given(
    ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49160)), max_size=40),
    skip=st.booleans(),
    cut=st.integers(1, 5),
)
def test_deltas_of_any_ids_join_to_one_decode(smollm2: Streams, ids: list[int], skip: bool, cut: int) -> None:
    """A03: stray bytes, special tokens and ids that no token has, in any order."""
    smollm2.check(ids, skip=skip, cut=cut)


@given(data=st.data(), skip=st.booleans(), cut=st.integers(1, 5))
def test_deltas_join_to_one_decode_with_tokenizers_of_other_kinds(
    small: Streams, data: st.DataObject, skip: bool, cut: int
) -> None:
    """A04, A05, A06."""
    ids = st.integers(0, small.tokenizer.vocab_size)
    mostly_last = st.one_of(ids, st.integers(max(0, small.tokenizer.vocab_size - 12), small.tokenizer.vocab_size))
    small.check(data.draw(st.lists(mostly_last, max_size=30)), skip=skip, cut=cut)


@given(
    text=st.one_of(st.text(max_size=30), st.text(st.sampled_from("ab .'日é<t>👨\u200d"), max_size=20)), data=st.data()
)
def test_deltas_of_any_text_join_to_one_decode_with_tokenizers_of_other_kinds(
    small: Streams, text: str, data: st.DataObject
) -> None:
    """A04."""
    small.check(small.ids(text), skip=data.draw(st.booleans()), cut=data.draw(st.integers(1, 5)))


@given(data=st.data(), cut=st.integers(0, 20))
def test_copy_goes_on_as_the_original_does(small: Streams, data: st.DataObject, cut: int) -> None:
    ids = data.draw(st.lists(st.integers(0, small.tokenizer.vocab_size), max_size=20))
    decoder = small.factory.create(skip_special_tokens=True)
    decoder.push(ids[:cut])
    copied = decoder.copy()
    rest = decoder.push(ids[cut:]) + decoder.finish()
    assert copied.push(ids[cut:]) + copied.finish() == rest


@given(text=st.text(st.sampled_from("ab 日é👨\u200d"), max_size=20), cut=st.integers(1, 3))
def test_deltas_of_text_that_falls_back_to_bytes_join_to_it(sentencepiece: Streams, text: str, cut: int) -> None:
    ids = sentencepiece.ids(text)
    assert "".join(sentencepiece.deltas(ids, cut=cut)) == sentencepiece.whole(ids) == text


@pytest.mark.parametrize("char", ["ď", "日", FAMILY])
def test_character_of_several_tokens_comes_whole_and_at_once(smollm2: Streams, char: str) -> None:
    """A02: nothing until its last token, then the character."""
    for symbol in char:
        ids = smollm2.ids(symbol)
        deltas = smollm2.deltas(ids)
        assert deltas == [*[""] * (len(ids) - 1), symbol, ""]
    assert "".join(smollm2.deltas(smollm2.ids(char))) == char


def test_stray_continuation_bytes_are_replaced_and_later_text_is_right(smollm2: Streams) -> None:
    """A03."""
    lone = smollm2.ids("日")[-1]
    ids = [lone, lone, *smollm2.ids("日本 x")]
    assert smollm2.whole(ids).endswith("日本 x")
    smollm2.check(ids, skip=True, cut=1)


def test_character_never_completed_is_replaced_at_the_end(smollm2: Streams) -> None:
    """A29: as one decode of the ids shows it."""
    first = smollm2.ids("😀")[0]
    assert smollm2.deltas([first]) == ["", "\ufffd"]
    assert smollm2.whole([first]) == "\ufffd"


@pytest.mark.parametrize("tokens", [["▁"], ["▁a"], ["▁▁"], ["▁", "▁a"], ["▁▁", "a"], ["<s>", "▁a", "▁b"]])
def test_leading_space_is_dropped_exactly_as_one_decode_drops_it(sentencepiece: Streams, tokens: list[str]) -> None:
    """A05."""
    sentencepiece.check([sentencepiece.id(token) for token in tokens], skip=True, cut=1)


def test_space_marked_first_token_of_byte_level_keeps_its_space(smollm2: Streams) -> None:
    """A05."""
    assert smollm2.deltas([smollm2.id("Ġx")]) == [" x", ""]


def test_added_token_gets_no_spaces_around_it(sentencepiece: Streams) -> None:
    """A06."""
    ids = [sentencepiece.id(token) for token in ("a", "<t>", "b")]
    assert sentencepiece.deltas(ids) == ["a", "<t>", "b", ""]


def test_special_tokens_are_shown_only_where_asked_for(smollm2: Streams) -> None:
    ids = smollm2.ids("a<|im_end|>b")
    assert "".join(smollm2.deltas(ids, skip=True)) == "ab"
    assert "".join(smollm2.deltas(ids, skip=False)) == "a<|im_end|>b"


def test_bytes_of_a_run_that_turns_out_invalid_are_replaced_one_by_one(sentencepiece: Streams) -> None:
    ids = [sentencepiece.id(token) for token in ("<0xE6>", "<0x97>", "<0xA5>", "<0xFF>", "a")]
    assert sentencepiece.deltas(ids) == ["", "", "", "\ufffd\ufffd\ufffd\ufffd", "a", ""]


def test_text_before_a_run_of_bytes_is_not_held_back_with_it(sentencepiece: Streams) -> None:
    decoder = sentencepiece.factory.create(skip_special_tokens=True)
    assert decoder.push([sentencepiece.id("ab"), sentencepiece.id("<0xE6>")]) == "ab"


def test_thousands_of_one_byte_token_keep_the_state_small(smollm2: Streams) -> None:
    """A28: each is final as soon as the next one comes."""
    lone = smollm2.ids("日")[-1]
    assert smollm2.deltas([lone] * 4000) == ["\ufffd"] * 4000 + [""]


@pytest.mark.parametrize(("byte", "char", "max_held"), [("<0xE6>", "\ufffd", 1), ("<0x0A>", "\n", MAX_RUN)])
def test_thousands_of_one_byte_token_are_not_held_back(
    sentencepiece: Streams, byte: str, char: str, max_held: int
) -> None:
    """A28: neither the invalid ones, nor those that a later one could make invalid."""
    decoder = sentencepiece.factory.create(skip_special_tokens=True)
    shown = ""
    for count in range(1, 4001):
        shown += decoder.push([sentencepiece.id(byte)])
        assert count - len(shown) <= max_held
    shown += decoder.push([sentencepiece.id("▁a")]) + decoder.finish()
    assert shown == char * 4000 + " a"


def test_copy_within_a_run_of_bytes_goes_on_by_itself(sentencepiece: Streams) -> None:
    first, second, third = (sentencepiece.id(token) for token in ("<0xE6>", "<0x97>", "<0xA5>"))
    decoder = sentencepiece.factory.create(skip_special_tokens=True)
    decoder.push([first])
    copied = decoder.copy()
    assert decoder.push([first]) == "\ufffd\ufffd"
    assert copied.push([second, third, sentencepiece.id("a")]) == "日a"


def test_long_run_of_bytes_is_cut_between_characters(sentencepiece: Streams) -> None:
    ids = [sentencepiece.id(token) for token in ("a", *["<0xE6>", "<0x97>", "<0xA5>"] * 200, "b")]
    assert "".join(sentencepiece.deltas(ids)) == "a" + "日" * 200 + "b"


def test_decoder_of_unknown_kind_is_refused(smollm2: Streams) -> None:
    tokenizer = load_tokenizer(find_model("smollm2"))
    tokenizer.backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    with pytest.raises(TokenizerError, match="no known kind"):
        DecoderFactory(tokenizer)
