"""JSON schemas in the grammar library's language."""

from __future__ import annotations

import json
from typing import Any

JSON_OPTIONS = {
    "whitespace_pattern": r"[ \n\t]{0,20}",  # without a bound, a model may write blanks until its tokens are used up
    "lenient": False,  # what is not supported is refused, not ignored
    "coerce_one_of": False,
}


def json_expression(schema: dict[str, Any]) -> str:
    """Return what stands for a schema in a grammar. Raises ValueError for what the library does wrong."""
    return f"%json {json.dumps({**checked(schema), 'x-guidance': JSON_OPTIONS})}"


def checked(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema unless it asks for what the library does wrong: it lets a whole number through that is excluded
    as a bound, where the other bound is less than 1 away. Bounds may stand apart and meet by reference, so all are
    looked at."""
    above, below = _numbers(schema, "exclusiveMinimum"), _numbers(schema, "exclusiveMaximum")
    highest, lowest = {*below, *_numbers(schema, "maximum")}, {*above, *_numbers(schema, "minimum")}
    for bound in above:
        if bound % 1 == 0 and any(bound < other < bound + 1 for other in highest):
            raise ValueError(f"exclusiveMinimum {bound} is not supported with a maximum below {bound + 1}")
    for bound in below:
        if bound % 1 == 0 and any(bound - 1 < other < bound for other in lowest):
            raise ValueError(f"exclusiveMaximum {bound} is not supported with a minimum above {bound - 1}")
    return schema


def _numbers(schema: Any, name: str) -> set[float]:
    """Return the values of a keyword, wherever in a schema it stands."""
    children = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    found = set().union(*(_numbers(child, name) for child in children))
    value = schema.get(name) if isinstance(schema, dict) else None
    return found | {value} if isinstance(value, int | float) and not isinstance(value, bool) else found


def json_object_in(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value
