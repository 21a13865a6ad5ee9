"""Stop strings beside a plain search, for texts cut at every possible place."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.services.detokenizer.stop_strings import StopStringMatcher

short_texts = st.text(st.sampled_from("ab"), max_size=12)
stop_lists = st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=5), min_size=1, max_size=3)


def run(stops: list[str], pieces: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    """Return what is shown after each piece, then at the end, and the stop string found."""
    matcher = StopStringMatcher(stops, include_stop=include_stop)
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.matched is not None:
            return shown, matcher.matched
    return [*shown, matcher.finish()], None


def plain_search(stops: list[str], text: str) -> tuple[int, str] | None:
    """Return where the first stop string to be complete ends, and which: of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


@given(stops=stop_lists, text=short_texts, cuts=st.sets(st.integers(0, 12)), include_stop=st.booleans())
def test_cut_is_where_a_plain_search_puts_it(stops: list[str], text: str, cuts: set[int], include_stop: bool) -> None:
    """A08, A09, A10."""
    edges = sorted({0, len(text)} | {cut for cut in cuts if cut < len(text)})
    pieces = [text[start:end] for start, end in pairwise(edges)]
    shown, matched = run(stops, pieces, include_stop=include_stop)
    found = plain_search(stops, text)
    if found is None:
        assert ("".join(shown), matched) == (text, None)
    else:
        end, stop = found
        assert ("".join(shown), matched) == (text[: end if include_stop else end - len(stop)], stop)


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("stops", [["bab"], ["aab", "b"], ["abab", "bab", "ba"], ["abba"]])
def test_cut_does_not_depend_on_where_the_text_is_cut(stops: list[str], include_stop: bool) -> None:
    """A08: every text of nine characters that ends with a stop string's beginning, in all 256 ways."""
    text = "aababbaba"
    wanted = run(stops, [text], include_stop=include_stop)
    for places in range(2 ** (len(text) - 1)):
        edges = [0, *(edge for edge in range(1, len(text)) if places >> (edge - 1) & 1), len(text)]
        shown, matched = run(stops, [text[start:end] for start, end in pairwise(edges)], include_stop=include_stop)
        assert ("".join(shown), matched) == ("".join(wanted[0]), wanted[1])


@given(stops=stop_lists, text=short_texts)
def test_held_back_is_only_what_a_stop_string_may_begin_with(stops: list[str], text: str) -> None:
    """A13."""
    if plain_search(stops, text) is not None:
        return
    matcher = StopStringMatcher(stops, include_stop=False)
    shown = ""
    for end in range(1, len(text) + 1):
        shown += matcher.push(text[end - 1])
        beginnings = [n for n in range(end + 1) if any(stop.startswith(text[end - n : end]) for stop in stops)]
        assert len(shown) == end - max(beginnings)


@pytest.mark.parametrize("stops", [["beta gamma", "gamma"], ["gamma", "beta gamma"]])
def test_of_two_stop_strings_that_end_together_the_longer_cuts(stops: list[str]) -> None:
    """A10."""
    shown, matched = run(stops, ["alpha be", "ta gam", "ma delta"])
    assert ("".join(shown), matched) == ("alpha ", "beta gamma")


def test_long_stop_string_that_never_comes_leaves_the_text_complete() -> None:
    """A13."""
    stop = "ab" * 100
    text = "ab" * 99 + "c" + "ab" * 50
    shown, matched = run([stop], list(text))
    assert ("".join(shown), matched) == (text, None)
    assert shown[: len("ab" * 99)] == [""] * len("ab" * 99)


def test_text_after_the_match_is_dropped() -> None:
    """A12."""
    assert run(["five"], ["four, five, six"]) == (["four, "], "five")


def test_without_stop_strings_all_is_shown_at_once() -> None:
    assert run([], ["ab", "c"]) == (["ab", "c", ""], None)


@given(stops=stop_lists, passed=short_texts, text=short_texts)
def test_only_stop_strings_that_end_after_passed_over_text_match(stops: list[str], passed: str, text: str) -> None:
    matcher = StopStringMatcher(stops, include_stop=False)
    shown = "".join(map(matcher.pass_over, passed)) + matcher.push(text)
    ends = range(len(passed) + 1, len(passed + text) + 1)
    found = ((end, [stop for stop in stops if (passed + text)[:end].endswith(stop)]) for end in ends)
    end, complete = next(((end, complete) for end, complete in found if complete), (0, []))
    if complete:
        stop = max(complete, key=len)
        assert (shown, matcher.matched) == ((passed + text)[: end - len(stop)], stop)
    else:
        assert (shown + matcher.finish(), matcher.matched) == (passed + text, None)
