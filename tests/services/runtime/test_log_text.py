from __future__ import annotations

import pytest

from kvern.services.runtime.log_text import MAX_LOGGED_CHARS, logged


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a name", "a name"),
        ("two\nlines\r\x1b[31m", "two?lines??[31m"),
        ("\u2028\u202e", "??"),
        ("日本", "日本"),
        ("x" * 1000, "x" * MAX_LOGGED_CHARS),
    ],
)
def test_text_that_callers_wrote_stays_on_one_short_line(text: str, expected: str) -> None:
    assert logged(text) == expected
