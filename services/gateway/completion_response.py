"""What a completion answers: one object, or chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kvern.services.gateway.answers import Completion
from kvern.services.gateway.completion_request import CompletionRequest
from kvern.services.gateway.event_stream import ChunkWriter
from kvern.services.gateway.finish_reason import finish_reason
from kvern.services.gateway.head import Head
from kvern.services.gateway.logprobs import MAX_HELD_OF_COMPLETION, CompletionLogprobs, HeldLogprobs
from kvern.services.gateway.usage import Tally
from kvern.v1.inference_pb2 import Delta, Finished, GenerateResponse, TokenLogprobs

Numbered = AsyncGenerator[tuple[int, GenerateResponse], None]
"""Responses, each with the number of its prompt."""


class CompletionAnswer:
    """The answer to one or several prompts. Choices are numbered through: those of the first prompt come first."""

    def __init__(self, body: CompletionRequest, head: Head, tally: Tally) -> None:
        self._body = body
        self._head = head
        self._tally = tally
        num_prompts = len(body.prompts)
        self._logprobs = [CompletionLogprobs() for _ in range(num_prompts * body.num_choices)]
        self._held = HeldLogprobs("logprobs", MAX_HELD_OF_COMPLETION)
        self._begun = [False] * len(self._logprobs)
        self._prompts: list[list[TokenLogprobs]] = [[] for _ in range(num_prompts)]
        """Log-probabilities of each prompt's tokens but the first, where they are told."""

    async def whole(self, responses: Numbered) -> Completion:
        """Gather it. Raises ApiError where a choice failed."""
        texts: list[list[str]] = [[] for _ in self._logprobs]
        reasons = [""] * len(texts)
        async with aclosing(responses):
            async for prompt, response in responses:
                match response.WhichOneof("event"):
                    case "delta":
                        self._held.add(response.delta.logprobs)
                        texts[self._read(prompt, response.delta)].append(response.delta.text)
                    case "finished":
                        reasons[self._finish(prompt, response.finished)] = finish_reason(response.finished)
                    case _:
                        self._note(prompt, response)
        choices = [self._choice(index, "".join(texts[index]), reasons[index]) for index in range(len(texts))]
        fields = {**self._head.of("text_completion"), "choices": choices, "usage": self._tally.to_answer()}
        return Completion.model_validate(fields)

    async def events(self, responses: Numbered) -> AsyncGenerator[bytes, None]:
        """Yield it piece by piece. Raises ApiError where a choice failed."""
        async with aclosing(responses):
            self._note(*await anext(responses))
            has_usage = self._body.includes_usage or self._body.tells_usage_always
            writer = ChunkWriter(self._head.of("text_completion"), has_usage=has_usage)
            async for prompt, response in responses:
                match response.WhichOneof("event"):
                    case "delta":
                        yield self._chunk(writer, self._read(prompt, response.delta), response.delta.text)
                    case "finished":
                        reason = finish_reason(response.finished)
                        yield self._chunk(writer, self._finish(prompt, response.finished), "", reason)
                    case _:
                        self._note(prompt, response)
            if self._body.includes_usage:
                yield writer.usage(self._tally.to_answer())

    def _note(self, prompt: int, response: GenerateResponse) -> None:
        """Take in what is of no choice."""
        if response.HasField("started"):
            self._head.model = response.started.model
            self._tally.start(response.started, prompt)
        elif response.HasField("scheduled"):
            self._tally.schedule(response.scheduled, prompt)
        elif response.HasField("prompt_logprobs"):
            self._held.add(response.prompt_logprobs.items, times=self._body.num_choices)
            self._prompts[prompt] += response.prompt_logprobs.items

    def _read(self, prompt: int, told: Delta) -> int:
        """Take in more of a choice. Return its index."""
        index = self._index(prompt, told.index)
        self._tally.add(told.index, len(told.token_ids), prompt)
        if self._body.logprobs is not None:
            if self._body.echo and not self._begun[index]:
                self._logprobs[index].add_prompt(self._prompts[prompt], told.text, told.logprobs)
            self._begun[index] = True
            self._logprobs[index].add(told.logprobs)
        return index

    def _finish(self, prompt: int, finished: Finished) -> int:
        """Take in a choice's end. Return its index."""
        self._tally.finish(finished, prompt)
        return self._index(prompt, finished.index)

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self._body.num_choices + choice

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs[index].take(), "finish_reason": reason}

    def _chunk(self, writer: ChunkWriter, index: int, text: str, reason: str | None = None) -> bytes:
        usage = self._tally.to_answer() if self._body.tells_usage_always else None
        return writer.chunk(self._choice(index, text, reason), usage)
