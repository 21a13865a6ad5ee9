"""Hypothesis strategies for messages that are wrong, or only odd, in every field that their types have."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MAX_DEPTH = 5
"""Of messages in messages; the contract's own are not as deep."""

MANY = 5_000
"""Items of a list that is too long for anything, at little cost."""

_DEEP_JSON = "[" * 2_000 + "]" * 2_000

_JSON = [
    "",
    "{}",
    "[]",
    "null",
    "1e999",
    "{",
    '"\\ud800"',
    '{"a":NaN}',
    _DEEP_JSON,
    json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    json.dumps({"$ref": "#"}),
    json.dumps({"$ref": "#/nowhere"}),
    json.dumps({"type": "string", "minLength": 10**9}),
    json.dumps({"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}),
    json.dumps({"type": "string", "pattern": "(a|a)*(b|b)*{9999}"}),
    json.dumps({"allOf": [{"enum": [1]}, {"enum": [2]}]}),
    json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}]),
    json.dumps([{"type": "text", "text": "Hello"}]),
    json.dumps([{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]),
    json.dumps({"enable_thinking": True, "messages": 3, "raise_exception": "x", "range": [1]}),
]

_PATTERNS = [
    "a",
    "(",
    "[a-z]{1,3}",
    "(a+)+$",
    "(x{0,5000}){0,5000}",
    "\\p{L}+",
    "(?=a)",
    "\x00",
    "[^\\s\\S]",
    "a" * 5_000,
]

_GRAMMARS = [
    'start: "a"',
    "start: start",
    "start:",
    'start: "a"*',
    "%ignore /a/",
    'root ::= "yes" | "no"',
    '"',
    "start: /(/",
]

_TEXTS: Mapping[str, Sequence[str]] = {
    "model": ["smollm2", "", "another", "smollm2\n"],
    "role": ["user", "assistant", "system", "tool", "nobody"],
    "json_schema": _JSON,
    "structural_tag": _JSON,
    "tools_json": _JSON,
    "tool_calls_json": _JSON,
    "content_parts_json": _JSON,
    "template_kwargs_json": _JSON,
    "regex": _PATTERNS,
    "grammar": _GRAMMARS,
    "request_id": ["", "a", "a", "x" * 257],
}
"""By field name: what it may well be, right or wrong."""

_ODD_TEXTS = [
    "",
    " ",
    "Hello",
    "<|im_start|>",
    "\x00",
    "\ufffd",
    "\U0001f468\u200d\U0001f469",
    "x" * 300,
    "\n\n",
    "z" * 20_000,
]

_INTEGERS = [
    0,
    1,
    2,
    3,
    49_151,
    49_152,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -1,
    -(2**31),
    -(2**63),
]

_FLOATS = [0.0, 1.0, 0.5, -1.0, 2.0, 1e-30, 3e38, math.inf, -math.inf, math.nan]

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


@dataclass(frozen=True)
class Request:
    """A serialized message, right or wrong. It is not printed whole."""

    content: bytes

    def __repr__(self) -> str:
        return f"<{len(self.content)} bytes: {self.content[:500]!r}>"


def bad_messages(base: Message) -> st.SearchStrategy[Request]:
    """Return serialized messages of the base's type: it with some fields made odd, anything at all, and broken bytes.

    base: a message that is right.
    """
    descriptor = base.DESCRIPTOR
    odd_ones = st.one_of(_changed(base), _any_message(descriptor)).map(lambda message: message.SerializeToString())
    return st.one_of(odd_ones, odd_ones, _broken(odd_ones)).map(Request)


def _changed(base: Message) -> st.SearchStrategy[Message]:
    def change(odd: Message) -> Message:
        changed = type(base).FromString(base.SerializeToString())
        for field, _ in odd.ListFields():
            changed.ClearField(field.name)
        changed.MergeFrom(odd)
        return changed

    return _any_message(base.DESCRIPTOR, max_fields=2).map(change)


def _any_message(descriptor: Descriptor, depth: int = 0, max_fields: int | None = None) -> st.SearchStrategy[Message]:
    fields = (
        list(descriptor.fields) if depth < MAX_DEPTH else [each for each in descriptor.fields if not each.message_type]
    )
    make = GetMessageClass(descriptor)
    if not fields:
        return st.builds(make)

    @st.composite
    def build(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Message:
        message = make()
        chosen = st.lists(
            st.sampled_from(fields), min_size=1, max_size=max_fields or 6, unique_by=lambda each: each.name
        )
        for field in draw(chosen):
            _fill(message, field, draw(_values(field, depth)))
        return message

    return build()


def _fill(message: Message, field: FieldDescriptor, value: Any) -> None:
    held = getattr(message, field.name)
    if _is_map(field):
        for key, item in value.items():
            if isinstance(item, Message):
                held[key].CopyFrom(item)
            else:
                held[key] = item
    elif field.is_repeated:
        held.extend(value)
    elif field.message_type:
        held.CopyFrom(value)
        held.SetInParent()
    else:
        setattr(message, field.name, value)


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type and _is_map(field):
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        return st.dictionaries(_single(key, depth), _single(value, depth), max_size=3)
    if not field.is_repeated:
        return _single(field, depth)
    few = st.lists(_single(field, depth), max_size=3)
    return few if field.message_type else st.one_of(few, few, _single(field, depth).map(_repeated))


def _repeated(value: Any) -> list[Any]:
    return [value[:20] if isinstance(value, str) else value] * MANY


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _single(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type:
        return _any_message(field.message_type, depth + 1)
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return st.binary(max_size=40) if field.type == FieldDescriptor.TYPE_BYTES else _text(field.name)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.sampled_from(_FLOATS)
    low, high = _RANGES[kind]
    return st.sampled_from([each for each in _INTEGERS if low <= each <= high])


def _text(name: str) -> st.SearchStrategy[str]:
    odd = st.one_of(st.sampled_from(_ODD_TEXTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    return st.one_of(st.sampled_from(_TEXTS[name]), odd) if name in _TEXTS else odd


def _broken(messages: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Cut off a message, change a byte of it, or take anything."""

    @st.composite
    def spoil(draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
        message = bytearray(draw(messages) or b"\x0a")
        place = draw(st.integers(0, len(message) - 1))
        if draw(st.booleans()):
            return bytes(message[:place])
        message[place] = draw(st.integers(0, 255))
        return bytes(message)

    return st.one_of(spoil(), st.binary(max_size=60))
