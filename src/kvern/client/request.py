"""From a prompt and keyword options to the protocol's messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from google.protobuf.message import Message

from kvern.client.errors import invalid_argument
from kvern.client.options import CallOptions, ChatOptions, GenerateOptions
from kvern.v1 import inference_pb2 as pb

MAX_REQUEST_BYTES = 32 * 1024 * 1024
"""Largest message that a server accepts."""

_PARTS: dict[str, type[Message]] = {
    "sampling": pb.Sampling,
    "stopping": pb.Stopping,
    "output": pb.Output,
    "cache": pb.Cache,
    "constraint": pb.Constraint,
}
_PART_OF = {field.name: part for part, message in _PARTS.items() for field in message.DESCRIPTOR.fields}
_OWN = {"request_id", "model", "priority", "adapter", "session_id", "add_special_tokens", "keep_last_tokens"}
_CHAT = {
    "tools": "tools_json",
    "template_kwargs": "template_kwargs_json",
    "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message",
}


def generate_request(prompt: str | Sequence[int], options: GenerateOptions) -> pb.GenerateRequest:
    """Ask for the continuation of a text, or of token ids. Raises KvernError for what no request can say."""
    request = pb.GenerateRequest()
    _set_options(request, options)
    if isinstance(prompt, str):
        _set_field(request, "text", "text", prompt)
    else:
        request.token_ids.SetInParent()
        _set_field(request.token_ids, "token_ids.ids", "ids", prompt)
    return request


def chat_request(messages: Iterable[Mapping[str, object]], options: ChatOptions) -> pb.GenerateRequest:
    """Ask for the answer to a conversation. Raises KvernError for what no request can say."""
    request = pb.GenerateRequest()
    _set_options(request, {name: value for name, value in options.items() if name not in _CHAT})
    chat = request.chat
    chat.SetInParent()
    for name, value in options.items():
        if name in _CHAT:
            field = _CHAT[name]
            _set_field(chat, f"chat.{field}", field, value)
    for index, message in enumerate(messages):
        _set_message(chat.messages.add(), f"chat.messages[{index}]", message)
    return request


def tokenize_request(text: str, model: str) -> pb.TokenizeRequest:
    """Ask for the token ids of a text. Raises KvernError for what no request can say."""
    request = pb.TokenizeRequest()
    _set_field(request, "model", "model", model)
    _set_field(request, "text", "text", text)
    return request


def call_options_of(options: GenerateOptions) -> CallOptions:
    of_calls = {name: value for name, value in options.items() if name in CallOptions.__annotations__}
    return cast(CallOptions, of_calls)


def check_size(request: pb.GenerateRequest) -> None:
    """Raise KvernError for a request that every server refuses unread."""
    size = request.ByteSize()
    if size > MAX_REQUEST_BYTES:
        prompt = request.WhichOneof("prompt") or "prompt"
        raise invalid_argument(prompt, f"makes a request of {size} bytes, at most {MAX_REQUEST_BYTES} can be sent")


def _set_field(message: Message, path: str, name: str, value: object) -> None:
    """Set a field from what a caller gave. Raises KvernError with the path if it cannot hold that."""
    try:
        value = _CONVERSIONS[name](value) if name in _CONVERSIONS else value
        message.MergeFrom(type(message)(**{name: value}))
    except UnicodeEncodeError as error:
        raise invalid_argument(path, f"character {error.start} is half a surrogate pair, no valid Unicode") from error
    except (TypeError, ValueError) as error:
        raise invalid_argument(path, str(error)) from error


def _set_options(request: pb.GenerateRequest, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name in _PART_OF:
            part = _PART_OF[name]
            _set_field(getattr(request, part), f"{part}.{name}", name, value)
        elif name in _OWN:
            _set_field(request, name, name, value)
        elif name not in CallOptions.__annotations__:
            raise TypeError(f"no such option: {name!r}")


def _set_message(message: pb.ChatMessage, path: str, given: Mapping[str, object]) -> None:
    for name, value in given.items():
        field = _message_field(name, value)
        _set_field(message, f"{path}.{field}", field, value)


def _message_field(name: str, value: object) -> str:
    if name == "tool_calls":
        return "tool_calls_json"
    return "content_parts_json" if name == "content" and isinstance(value, list | tuple) else name


def _texts(value: str | Iterable[str]) -> Iterable[str]:
    return [value] if isinstance(value, str) else value


def _choices(value: Iterable[str]) -> pb.Choices:
    return pb.Choices(values=_texts(value))


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)


_CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "stop": _texts,
    "bad_words": _texts,
    "choices": _choices,
    "json_schema": _json,
    "structural_tag": _json,
    "tools_json": _json,
    "template_kwargs_json": _json,
    "tool_calls_json": _json,
    "content_parts_json": _json,
}
