"""What a chat completion answers: one object, or chunks of a stream."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from kvern.services.gateway.errors import ApiError
from kvern.v1 import inference_pb2
from kvern.v1.inference_pb2 import Finished, GenerateResponse, Started, Usage

_FINISH_REASONS = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}


async def completion(responses: AsyncIterator[GenerateResponse]) -> dict[str, Any]:
    """Gather a whole answer. Raises ApiError where a choice failed."""
    started, usage = Started(), Usage()
    texts: dict[int, list[str]] = defaultdict(list)
    finish_reasons: dict[int, str] = {}
    async for response in responses:
        if response.HasField("started"):
            started = response.started
        elif response.HasField("delta"):
            texts[response.delta.index].append(response.delta.text)
        elif response.HasField("finished"):
            finish_reasons[response.finished.index] = _finish_reason(response.finished)
            _add_usage(usage, response.finished)
    choices = [_choice(index, "".join(texts[index]), finish_reasons[index]) for index in sorted(finish_reasons)]
    return _head(started, "chat.completion") | {"choices": choices, "usage": _usage(usage)}


async def chunks(
    started: Started, responses: AsyncIterator[GenerateResponse], num_choices: int, *, include_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield an answer piece by piece, from what follows Started on. Raises ApiError where a choice failed."""
    head = _head(started, "chat.completion.chunk")
    if include_usage:
        head["usage"] = None
    usage = Usage()
    for index in range(num_choices):
        yield head | _piece(index, {"role": "assistant", "content": ""})
    async for response in responses:
        if response.HasField("delta") and response.delta.text:
            yield head | _piece(response.delta.index, {"content": response.delta.text})
        elif response.HasField("finished"):
            _add_usage(usage, response.finished)
            yield head | _piece(response.finished.index, {}, _finish_reason(response.finished))
    if include_usage:
        yield head | {"choices": [], "usage": _usage(usage)}


def _head(started: Started, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{started.request_id}", "object": kind, "created": int(time.time()), "model": started.model}


def _choice(index: int, text: str, finish_reason: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}


def _piece(index: int, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]}


def _finish_reason(finished: Finished) -> str:
    reason = _FINISH_REASONS.get(finished.reason)
    if reason is None:
        raise ApiError(500, finished.error or "the request was ended by an operator")
    return reason


def _add_usage(total: Usage, finished: Finished) -> None:
    """Add one choice's usage: prompt and cached tokens are the request's, the same in each."""
    total.prompt_tokens = finished.usage.prompt_tokens
    total.cached_tokens = finished.usage.cached_tokens
    total.completion_tokens += finished.usage.completion_tokens


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
