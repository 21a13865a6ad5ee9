from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvern.services.tokenizer.literals import any_of

LITERALS = st.lists(st.text("ab.|[", min_size=1, max_size=4), max_size=6)


def longest_at_leftmost(literals: list[str], text: str) -> str | None:
    for start in range(len(text)):
        found = [literal for literal in literals if text.startswith(literal, start)]
        if found:
            return max(found, key=len)
    return None


@given(LITERALS, st.text("ab.|[", max_size=12))
def test_longest_literal_at_the_leftmost_place_is_found(literals: list[str], text: str) -> None:
    match = any_of(literals).search(text)
    assert (match and match[0]) == longest_at_leftmost(literals, text)


def test_thousands_of_literals_that_begin_alike_are_not_tried_one_by_one() -> None:
    """Else this takes ten minutes."""
    pattern = any_of(f"<unused{number}>" for number in range(6000))
    assert pattern.search("<unused" * 500_000) is None
