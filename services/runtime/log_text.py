"""What callers may write at will, as it may stand in a log."""

from __future__ import annotations

MAX_LOGGED_CHARS = 128


def logged(text: str) -> str:
    """Return a text cut to `MAX_LOGGED_CHARS`, on one line: what is not printable is a question mark."""
    text = text[:MAX_LOGGED_CHARS]
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
