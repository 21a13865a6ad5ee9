"""The scanner beside the standard library's parser."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvern.services.gateway.parsing.json_scanner import JsonScanner, Status

FRAGMENTS = [*'{}[],:" \n\\+-.0129eE', '"a"', '"a":', "null", "true", "false", "\\u12ab", '\\"', "tru"]


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


def scan(pieces: list[str]) -> tuple[Status, str, int]:
    """Return the status, the text given, and how many characters were read."""
    scanner, out, num_read = JsonScanner(), [], 0  # type: tuple[JsonScanner, list[str], int]
    for piece in pieces:
        end = scanner.scan(piece, 0, out)
        num_read += end
        if end < len(piece):
            break
    return scanner.status, "".join(out), num_read


@settings(max_examples=500)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join))
@example("-01")
@example('{"a":1,}')
@example('["a\\u12aG"]')
def test_object_or_array_is_complete_where_the_standard_library_reads_it(inner: str) -> None:
    text = f"[{inner}]"
    status, read, num_read = scan(list(text))
    assert (status is Status.COMPLETE and num_read == len(text)) == is_json(text.replace("\n", " "))
    assert scan([text]) == (status, read, num_read)


@pytest.mark.parametrize("text", ["1", "-0", "10.5e+3", "0", "1E5", "2.0"])
def test_number_ends_before_the_next_character(text: str) -> None:
    assert scan([*text, ","]) == (Status.COMPLETE, text, len(text))


@pytest.mark.parametrize("text", ["-", "1.", "1e", "1e+", "-a", "."])
def test_number_that_is_none_breaks(text: str) -> None:
    status, _, num_read = scan([*text, ","])
    assert (status, num_read) == (Status.BROKEN, len(text) if text[-1] not in "a." or text == "1." else len(text) - 1)


def test_control_characters_in_strings_are_escaped() -> None:
    assert scan(['{"a\n":\n"\t\x00é"}']) == (Status.COMPLETE, '{"a\\n":\n"\\t\\u0000é"}', 13)
