"""One pattern for many literal strings."""

from __future__ import annotations

import re
from collections.abc import Iterable

_Tree = dict[str, "_Tree"]

_END = ""


def any_of(literals: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds, at the leftmost place, the longest of the literals there. None of them is empty.

    Common beginnings are written once. Alternatives one by one would be tried at every place, and there are tokenizers
    with thousands of control tokens.
    """
    root: _Tree = {}
    for literal in literals:
        node = root
        for character in literal:
            node = node.setdefault(character, {})
        node[_END] = {}
    return re.compile(_expression(root) or "(?!)")


def _expression(node: _Tree) -> str:
    branches = [re.escape(character) + _expression(after) for character, after in node.items() if character != _END]
    if not branches:
        return ""
    expression = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{expression})?" if _END in node else expression
