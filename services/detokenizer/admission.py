"""What of a request only the engine's limits decide, and the request as the engine takes it."""

from __future__ import annotations

from kvern.services.runtime.errors import InvalidArgument
from kvern.services.runtime.text import check_token_ids
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2


def to_add_request(request: inference_pb2.GenerateRequest, info: replica_pb2.EngineInfo) -> engine_pb2.AddRequest:
    """Check a request against the engine's limits and convert it. Raises InvalidArgument."""
    token_ids = request.token_ids.ids
    check_token_ids("token_ids.ids", token_ids, info.vocab_size)
    check_token_ids("stopping.stop_token_ids", request.stopping.stop_token_ids, info.vocab_size)
    add = engine_pb2.AddRequest(
        prompt_token_ids=token_ids,
        sampling=request.sampling,
        stopping=request.stopping,
        cache=request.cache,
        priority=request.priority,
        adapter=request.adapter,
    )
    add.stopping.ClearField("stop")
    add.stopping.max_tokens = _max_tokens(len(token_ids), request.stopping, info.max_model_len)
    return add


def _max_tokens(num_prompt_tokens: int, stopping: inference_pb2.Stopping, max_model_len: int) -> int:
    """Return how many tokens may come out: what was asked for, or what the context still holds."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise InvalidArgument(
            "prompt", f"{num_prompt_tokens} tokens, the limit is {max_model_len} with at least one token of output"
        )
    if not stopping.HasField("max_tokens"):
        return room
    if stopping.max_tokens > room:
        raise InvalidArgument(
            "stopping.max_tokens",
            f"{stopping.max_tokens} tokens after a prompt of {num_prompt_tokens} exceed the limit, {max_model_len}",
        )
    return stopping.max_tokens
