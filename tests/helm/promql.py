"""What queries ask for, held against what a live set exposes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import grpc
import promql_parser
from promql_parser import AggModifierType, AggregateExpr, BinaryExpr, MatchOp, VectorSelector

Exposed = Mapping[str, Collection[Mapping[str, str]]]
"""Labels of each series by its name."""

SCRAPE_LABELS = frozenset({"namespace", "job", "instance", "pod", "container"})
"""What Prometheus itself adds to every series."""

_CODES = frozenset(code.name for code in grpc.StatusCode)


def parse(query: str) -> Any:
    """Return the expression. Raises ValueError where it is none."""
    return promql_parser.parse(query)


def nodes(expression: Any) -> list[Any]:
    found: list[Any] = []
    promql_parser.walk(expression, pre_visit=found.append)
    return found


def selectors(expression: Any) -> list[VectorSelector]:
    return [node for node in nodes(expression) if isinstance(node, VectorSelector)]


def series(expression: Any) -> set[str]:
    return {selector.name or "" for selector in selectors(expression)}


def matchers(selector: VectorSelector) -> list[Any]:
    return [matcher for matcher in selector.matchers.matchers if matcher.name != "__name__"]


def missing(query: str, exposed: Exposed, *, of_any_value: Collection[str] = ()) -> list[str]:
    """Return what a query names and nothing exposes: series, labels, values of labels other than `of_any_value`."""
    expression = parse(query)
    return [*_missing_series(expression, exposed, of_any_value), *_missing_groups(expression, exposed)]


def _missing_series(expression: Any, exposed: Exposed, of_any_value: Collection[str]) -> Iterator[str]:
    for selector in selectors(expression):
        if selector.name not in exposed:
            yield f"no series {selector.name}"
            continue
        for matcher in matchers(selector):
            if matcher.name in SCRAPE_LABELS:
                continue
            values = {labels.get(matcher.name) for labels in exposed[selector.name]} - {None}
            if not values:
                yield f"{selector.name} has no label {matcher.name}"
            known = values | _CODES if matcher.name == "code" else values
            for value in _values(matcher):
                if value not in known and matcher.name not in of_any_value:
                    yield f"{selector.name} is never {matcher.name}={value}; it is {sorted(map(str, values))}"


def _values(matcher: Any) -> list[str]:
    """Return the values that a matcher names; none for one that takes anything."""
    if matcher.op in (MatchOp.Equal, MatchOp.NotEqual):
        return [matcher.value]
    return [] if matcher.value == ".*" else matcher.value.split("|")


def _missing_groups(expression: Any, exposed: Exposed) -> Iterator[str]:
    """Return what is grouped or joined by and is a label of none of the series below."""
    for node in nodes(expression):
        labels = _grouped_by(node)
        known = set(SCRAPE_LABELS)
        for name in series(node):
            known.update(*exposed.get(name, ()))
        yield from (f"{node.prettify()}: no label {label}" for label in labels - known)


def _grouped_by(node: Any) -> set[str]:
    if isinstance(node, AggregateExpr) and node.modifier is not None and node.modifier.type is AggModifierType.By:
        return set(node.modifier.labels)
    if isinstance(node, BinaryExpr) and node.modifier is not None and node.modifier.matching is not None:
        return set(node.modifier.matching.labels)
    return set()


def is_condition(expression: Any) -> bool:
    """Whether an expression is empty when all is well: it compares, or asks for what is absent."""
    comparisons = {">", "<", "==", ">=", "<=", "!="}
    top = [expression]
    while top:
        node = top.pop()
        if isinstance(node, BinaryExpr) and str(node.op) in ("and", "or"):
            top += [node.lhs, node.rhs]
        elif isinstance(node, BinaryExpr) and str(node.op) in comparisons:
            continue
        elif not re.match(r"absent\(", node.prettify()):
            return False
    return True
