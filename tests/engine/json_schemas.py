"""JSON schemas of varied shape, small enough that a small model comes to their end, and the same in every run."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_NAMES = ("name", "id", "age", "city", "tags", "price", "is_open", "kind", "note", "größe")
_WORDS = ("red", "green", "blue", "a b", 'say "hi"', "1", "naïve", "")


def make_schemas(count: int, seed: int = 0) -> list[Schema]:
    """Return that many schemas. The first ones walk through every shape once."""
    rng = random.Random(seed)
    return [_ROOTS[number % len(_ROOTS)](rng, 2) for number in range(count)]


def _any(rng: random.Random, depth: int) -> Schema:
    return rng.choice(_SHAPES if depth > 0 else _LEAVES)(rng, depth)


def _string(rng: random.Random, _: int) -> Schema:
    least = rng.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(1, 6)}


def _pattern(rng: random.Random, _: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(("^[a-z]{2,5}$", r"^\d{3}-\d{2}$", "^(yes|no)$", "^[A-F0-9]+$"))}


def _format(rng: random.Random, _: int) -> Schema:
    return {"type": "string", "format": rng.choice(("date", "ipv4", "uuid"))}


def _integer(rng: random.Random, _: int) -> Schema:
    least = rng.randrange(-20, 20)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randrange(300)}


def _number(rng: random.Random, _: int) -> Schema:
    least = rng.randrange(-5, 5)
    return {"type": "number", "exclusiveMinimum": least, "exclusiveMaximum": least + rng.choice((1, 2.5, 7))}


def _multiple(rng: random.Random, _: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": rng.choice((2, 5, 10))}


def _boolean(_: random.Random, __: int) -> Schema:
    return {"type": ["boolean", "null"]}


def _enum(rng: random.Random, _: int) -> Schema:
    return {"enum": rng.sample([*_WORDS, 1, 2.5, None, True, [1, "x"], {"a": 1}], 3)}


def _const(rng: random.Random, _: int) -> Schema:
    return {"const": rng.choice([*_WORDS, 42, -1.5, False, [], {"k": [1]}])}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(2)
    return {
        "type": "array",
        "items": _any(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randrange(1, 3),
    }


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [_any(rng, depth - 1) for _ in range(2)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": sorted(rng.sample(names, rng.randrange(len(names) + 1))),
        "additionalProperties": False,
    }


def _map(rng: random.Random, depth: int) -> Schema:
    return {
        "type": "object",
        "properties": {"x": {"const": 1}},
        "required": ["x"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    }


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1), _any(rng, depth - 1)]}


def _all_of(rng: random.Random, _: int) -> Schema:
    return {"allOf": [{"type": "integer", "minimum": rng.randrange(5)}, {"maximum": 10 + rng.randrange(90)}]}


def _ref(rng: random.Random, depth: int) -> Schema:
    return {
        "$defs": {"part": _any_leaf(rng)},
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/part"}, "second": {"$ref": "#/$defs/part"}},
        "required": ["first"],
        "additionalProperties": False,
    }


def _recursive(rng: random.Random, _: int) -> Schema:
    node = {
        "type": "object",
        "properties": {"value": _any_leaf(rng), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _any_leaf(rng: random.Random) -> Schema:
    return _any(rng, 0)


_LEAVES = (_string, _pattern, _format, _integer, _number, _multiple, _boolean, _enum, _const)
_SHAPES = (*_LEAVES, _array, _tuple, _object, _map, _any_of, _all_of)
_ROOTS = (*_SHAPES, _object, _ref, _recursive)
