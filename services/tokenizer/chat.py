"""Chats to text, through the model's own template."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic_core import from_json

from kvern.services.runtime.bounded_process import MIB
from kvern.services.runtime.bounded_work import BoundedWork
from kvern.services.runtime.errors import InvalidArgument
from kvern.services.runtime.text import Tokenizer
from kvern.services.tokenizer.control_tokens import ControlTokenGuard
from kvern.services.tokenizer.template_limits import LIMITS
from kvern.v1 import inference_pb2

_MAX_REASON_CHARS = 256
"""It may quote the whole chat, and a status has room for a few kilobytes."""


class ChatRenderer:
    """Renders the chats of one model, with the control tokens in their strings marked. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, guard: ControlTokenGuard) -> None:
        self._transformers = tokenizer.transformers
        self._guard = guard
        self._processes = BoundedWork("kvern.services.tokenizer.template_process")
        parameters = inspect.signature(self._transformers.apply_chat_template).parameters
        self._reserved = parameters.keys() - {"documents"} | {"messages"}

    def render(self, chat: inference_pb2.Chat) -> str:
        """Return the text that stands for a chat. Raises InvalidArgument, with the template's reason if it refuses."""
        if self._transformers.chat_template is None:
            raise InvalidArgument("chat", "the model has no chat template; send text or token_ids")
        if not chat.messages:
            raise InvalidArgument("chat.messages", "must not be empty")
        messages = [self._message(f"chat.messages[{index}]", item) for index, item in enumerate(chat.messages)]
        tools = self._guard.mark(_parse("chat.tools_json", chat.tools_json, list))
        variables = self._variables(chat.template_kwargs_json)
        opens_turn = not chat.continue_final_message
        if chat.HasField("add_generation_prompt"):
            opens_turn = chat.add_generation_prompt
        if opens_turn and chat.continue_final_message:
            raise InvalidArgument("chat", "continue_final_message and add_generation_prompt are not compatible")
        try:
            job = {
                "messages": messages,
                "tools": tools or None,
                "chat_template": self._transformers.get_chat_template(None, tools or None),
                "add_generation_prompt": opens_turn,
                "continue_final_message": chat.continue_final_message,
                "variables": {**self._transformers.special_tokens_map, **variables},
            }
            answer = self._processes.ask(job)
        except ValueError as error:  # no template for this, or a number that has too many digits to be written
            answer = {"refused": str(error)}
        if answer is None:
            limits = f"{LIMITS.cpu_s:g} s of processor time or {LIMITS.num_bytes // MIB} MiB of memory"
            raise InvalidArgument("chat", f"the model's template needs more than {limits} for it")
        if "refused" in answer:
            reason = self._guard.unmark(answer["refused"])[:_MAX_REASON_CHARS]
            raise InvalidArgument("chat", f"the model's template refuses it: {reason}")
        return str(answer["rendered"])

    def _variables(self, template_kwargs_json: str) -> dict[str, Any]:
        field = "chat.template_kwargs_json"
        variables: dict[str, Any] = self._guard.mark(_parse(field, template_kwargs_json, dict)) or {}
        for name in variables.keys() & self._reserved:
            raise InvalidArgument(field, f"{name!r} is no variable of a template")
        return variables

    def _message(self, field: str, message: inference_pb2.ChatMessage) -> dict[str, Any]:
        """Convert a message to what templates expect. Absent fields stay absent: to templates, empty ones differ."""
        values: dict[str, Any] = {"role": message.role}
        if message.HasField("content"):
            values["content"] = message.content
        if message.content_parts_json:
            values["content"] = _joined_parts(f"{field}.content_parts_json", message.content_parts_json)
        if message.tool_calls_json:
            values["tool_calls"] = _tool_calls(f"{field}.tool_calls_json", message.tool_calls_json)
        for name in ("tool_call_id", "name", "reasoning_content"):
            if value := getattr(message, name):
                values[name] = value
        return self._guard.mark_assistant(values) if message.role == "assistant" else self._guard.mark(values)


def _parse(field: str, text: str, kind: type) -> Any:
    """Parse a JSON field; None if it is empty."""
    if not text:
        return None
    # This parser also refuses half a surrogate pair, which no tokenizer takes.
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidArgument(field, f"must be JSON: {error}") from error
    if not isinstance(value, kind):
        raise InvalidArgument(field, f"must be a JSON {'array' if kind is list else 'object'}")
    return value


def _joined_parts(field: str, text: str) -> str:
    """Return typed parts as one string, which every template takes; the models served here read nothing but text."""
    parts = _parse(field, text, list)
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidArgument(f"{field}[{index}]", 'must be {"type": "text", "text": "..."}')
    return "\n".join(part["text"] for part in parts)


def _tool_calls(field: str, text: str) -> list[Any]:
    """Return tool calls with their arguments as objects: clients send them as objects or as JSON text."""
    calls: list[Any] = _parse(field, text, list)
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _parse(f"{field}[{index}].function.arguments", function["arguments"], dict)
    return calls
