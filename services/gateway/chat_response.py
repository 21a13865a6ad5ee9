"""What a chat completion answers: one object, or chunks of a stream."""

from __future__ import annotations

import secrets
import string
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from kvern.services.gateway import logprobs
from kvern.services.gateway.answers import ChatCompletion
from kvern.services.gateway.chat_request import NO_FORMAT, ChatCompletionRequest, OutputFormats
from kvern.services.gateway.event_stream import ChunkWriter
from kvern.services.gateway.finish_reason import finish_reason
from kvern.services.gateway.forced_calls import NamedCall, open_listed_calls
from kvern.services.gateway.head import Head
from kvern.services.gateway.parsing import (
    Content,
    OutputParser,
    Piece,
    Reasoning,
    ToolCallArguments,
    ToolCallBegins,
    open_parser,
)
from kvern.services.gateway.usage import Tally
from kvern.v1.inference_pb2 import Delta, Finished, GenerateResponse

_ID_CHARS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Of a tool call's id. Templates of some models (Mistral's) take no other length when it is replayed."""


def parser_opener(
    body: ChatCompletionRequest, formats: OutputFormats, *, begins_in_reasoning: bool = False
) -> Callable[[], OutputParser]:
    """Return what opens a parser for each choice of an answer."""
    if (tool := body.forced_tool) is not None:
        return lambda: NamedCall(tool.function.name)
    tools = [tool.function.name for tool in body.offered_tools]
    if body.must_call:
        return lambda: open_listed_calls(tools)
    may_reason = body.may_reason
    return lambda: open_parser(
        tools=tools,
        tool_format=formats.tool_calls,
        reasoning_format=formats.reasoning if may_reason else NO_FORMAT,
        begins_in_reasoning=begins_in_reasoning,
    )


class _Choice:
    """One choice, as it comes: its messages in, deltas of OpenAI's form out."""

    def __init__(self, index: int, parser: OutputParser, *, calls_several: bool) -> None:
        self.index = index
        self.num_reasoning_tokens = 0
        self._parser = parser
        self._calls_several = calls_several
        self._has_calls = False
        self._logprobs: list[dict[str, Any]] = []

    def read(self, told: Delta) -> dict[str, Any]:
        """Return what is new, if anything is to be shown yet."""
        self._logprobs += logprobs.of_chat(told.logprobs)
        delta = self._delta(self._parser.push(told.text)) if told.text else {}
        if "reasoning_content" in delta and "content" not in delta:
            self.num_reasoning_tokens += len(told.token_ids)
        return delta

    def finish(self, finished: Finished) -> tuple[dict[str, Any], str]:
        """Return what was held back, and why the choice ended. Raises ApiError if it failed."""
        reason = finish_reason(finished)
        delta = self._delta(self._parser.finish())
        return delta, "tool_calls" if self._has_calls and reason == "stop" else reason

    def take_logprobs(self) -> dict[str, Any] | None:
        """Return those that no chunk has told of."""
        if not self._logprobs:
            return None
        taken, self._logprobs = self._logprobs, []
        return {"content": taken, "refusal": None}

    def _delta(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for piece in pieces:
            match piece:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case ToolCallBegins(index) | ToolCallArguments(index) if index == 0 or self._calls_several:
                    self._has_calls = True
                    delta.setdefault("tool_calls", []).append(_call_delta(piece))
        return delta


def _call_delta(piece: ToolCallBegins | ToolCallArguments) -> dict[str, Any]:
    if isinstance(piece, ToolCallArguments):
        return {"index": piece.index, "function": {"arguments": piece.text}}
    call_id = "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))
    return {"index": piece.index, "id": call_id, "type": "function", "function": {"name": piece.name, "arguments": ""}}


class _Message:
    """A choice's message, put together from its deltas."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._finish_reason = ""

    def add(self, delta: dict[str, Any]) -> None:
        self._content.append(delta.get("content", ""))
        self._reasoning.append(delta.get("reasoning_content", ""))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                self._calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def finish(self, delta: dict[str, Any], reason: str) -> None:
        self.add(delta)
        self._finish_reason = reason

    def to_choice(self, choice: _Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content), "refusal": None}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = message["content"] or None
        return {
            "index": choice.index,
            "message": message,
            "logprobs": choice.take_logprobs(),
            "finish_reason": self._finish_reason,
        }


class ChatAnswer:
    """The answer to one chat."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        find_opener: Callable[[str], Awaitable[Callable[[], OutputParser]]],
        head: Head,
        tally: Tally,
    ) -> None:
        """find_opener: finds, once it is known which model answers, what opens a parser for each choice."""
        self._body = body
        self._find_opener = find_opener
        self._head = head
        self._tally = tally
        self._choices: list[_Choice] = []

    async def whole(self, responses: AsyncGenerator[GenerateResponse, None]) -> ChatCompletion:
        """Gather it. Raises ApiError where a choice failed."""
        held = logprobs.HeldLogprobs("top_logprobs", logprobs.MAX_HELD_OF_CHAT)
        async with aclosing(responses):
            await self._begin(responses)
            messages = [_Message() for _ in self._choices]
            async for response in responses:
                match response.WhichOneof("event"):
                    case "delta":
                        held.add(response.delta.logprobs)
                        messages[response.delta.index].add(self._read(response.delta))
                    case "finished":
                        messages[response.finished.index].finish(*self._finish(response.finished))
                    case _:
                        self._note(response)
        choices = [message.to_choice(choice) for message, choice in zip(messages, self._choices, strict=True)]
        fields = {**self._head.of("chat.completion"), "choices": choices, "usage": self._tally.to_answer()}
        return ChatCompletion.model_validate(fields)

    async def events(self, responses: AsyncGenerator[GenerateResponse, None]) -> AsyncGenerator[bytes, None]:
        """Yield it piece by piece. Raises ApiError where a choice failed."""
        async with aclosing(responses):
            await self._begin(responses)
            has_usage = self._body.includes_usage or self._body.tells_usage_always
            writer = ChunkWriter(self._head.of("chat.completion.chunk"), has_usage=has_usage)
            for choice in self._choices:
                yield self._chunk(writer, choice, {"role": "assistant", "content": ""})
            async for response in responses:
                for chunk in self._chunks(writer, response):
                    yield chunk
            if self._body.includes_usage:
                yield writer.usage(self._tally.to_answer())

    async def _begin(self, responses: AsyncGenerator[GenerateResponse, None]) -> None:
        self._note(await anext(responses))
        open_parser = await self._find_opener(self._head.model)
        self._choices = [
            _Choice(index, open_parser(), calls_several=self._body.may_call_several)
            for index in range(self._body.num_choices)
        ]

    def _chunks(self, writer: ChunkWriter, response: GenerateResponse) -> Iterator[bytes]:
        match response.WhichOneof("event"):
            case "delta":
                if delta := self._read(response.delta):
                    yield self._chunk(writer, self._choices[response.delta.index], delta)
            case "finished":
                choice = self._choices[response.finished.index]
                delta, reason = self._finish(response.finished)
                if delta:
                    yield self._chunk(writer, choice, delta)
                yield self._chunk(writer, choice, {}, reason)
            case _:
                self._note(response)

    def _note(self, response: GenerateResponse) -> None:
        """Take in what is of no choice."""
        if response.HasField("started"):
            self._head.model = response.started.model
            self._tally.start(response.started)
        elif response.HasField("scheduled"):
            self._tally.schedule(response.scheduled)

    def _read(self, told: Delta) -> dict[str, Any]:
        self._tally.add(told.index, len(told.token_ids))
        return self._choices[told.index].read(told)

    def _finish(self, finished: Finished) -> tuple[dict[str, Any], str]:
        choice = self._choices[finished.index]
        self._tally.finish(finished)
        self._tally.reasoning_tokens += choice.num_reasoning_tokens
        return choice.finish(finished)

    def _chunk(self, writer: ChunkWriter, choice: _Choice, delta: dict[str, Any], reason: str | None = None) -> bytes:
        fields = {
            "index": choice.index,
            "delta": delta,
            "logprobs": choice.take_logprobs(),
            "finish_reason": reason,
        }
        return writer.chunk(fields, self._tally.to_answer() if self._body.tells_usage_always else None)
