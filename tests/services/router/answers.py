"""What a client receives, put together."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvern.v1 import inference_pb2

from .setup import Call


@dataclass
class Answer:
    """What a client has of one request."""

    events: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    """As Scheduled told."""
    text: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[inference_pb2.TokenLogprobs]] = field(default_factory=dict)
    outcomes: dict[int, tuple[object, ...]] = field(default_factory=dict)
    timings: list[inference_pb2.Timing] = field(default_factory=list)

    @property
    def content(self) -> tuple[object, ...]:
        """All that must not depend on who served it."""
        heads = [event for event in self.events if event not in ("delta", "finished")]
        return heads, self.text, self.token_ids, self.logprobs, self.outcomes

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        self.events.append(response.WhichOneof("event") or "")
        delta, finished, usage = response.delta, response.finished, response.finished.usage
        if response.HasField("scheduled"):
            self.cached_tokens = response.scheduled.cached_tokens
        if response.HasField("delta"):
            self.text[delta.index] = self.text.get(delta.index, "") + delta.text
            self.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
            self.logprobs.setdefault(delta.index, []).extend(delta.logprobs)
        if response.HasField("finished"):
            assert finished.index not in self.outcomes
            assert usage.cached_tokens == self.cached_tokens
            counts = usage.prompt_tokens, usage.completion_tokens
            self.outcomes[finished.index] = finished.reason, finished.stop, finished.stop_token_id, *counts
            self.timings.append(finished.timing)


async def answer_of(call: Call) -> Answer:
    answer = Answer()
    async for response in call:
        answer.take(response)
    return answer
