"""What of a request only the engine's limits decide, and the request as the engine takes it."""

from __future__ import annotations

from kvern.services.runtime.errors import InvalidArgument
from kvern.services.runtime.text import check_token_ids
from kvern.services.runtime.validate import MAX_AGE_S, check_generate
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2


def to_add_request(serve: replica_pb2.ServeRequest, info: replica_pb2.EngineInfo) -> engine_pb2.AddRequest:
    """Check a request, for not only routers may call, and convert it, all but what it resumes. Raises InvalidArgument,
    Unsupported.
    """
    request = serve.request
    check_generate(request)
    if request.WhichOneof("prompt") != "token_ids":
        raise InvalidArgument("token_ids", "a replica takes no other prompt")
    if not 0 <= serve.age_s <= MAX_AGE_S:
        raise InvalidArgument("age_s", f"must be in [0, {MAX_AGE_S:g}], got {serve.age_s:g}")
    token_ids = request.token_ids.ids
    _check_vocabulary(serve, info.vocab_size)
    add = engine_pb2.AddRequest(
        prompt_token_ids=token_ids,
        sampling=request.sampling,
        stopping=request.stopping,
        cache=request.cache,
        priority=request.priority,
        adapter=request.adapter,
        constraint=request.constraint if request.HasField("constraint") else None,
        bad_words=serve.bad_words,
        age_s=serve.age_s,
    )
    add.sampling.ClearField("bad_words")
    add.stopping.ClearField("stop")
    add.stopping.max_tokens = _max_tokens(len(token_ids), request.stopping, info.max_model_len)
    _check_progress(request.resume, add.stopping.max_tokens)
    _set_logprobs(add, request)
    return add


def _set_logprobs(add: engine_pb2.AddRequest, request: inference_pb2.GenerateRequest) -> None:
    output = request.output
    if output.HasField("logprobs"):
        add.logprobs = output.logprobs
    # All of the prompt's had come before the first token.
    if output.HasField("prompt_logprobs") and not any(choice.token_ids for choice in request.resume.choices):
        add.prompt_logprobs = output.prompt_logprobs


def _check_vocabulary(serve: replica_pb2.ServeRequest, vocab_size: int) -> None:
    sampling, stopping = serve.request.sampling, serve.request.stopping
    check_token_ids("token_ids.ids", serve.request.token_ids.ids, vocab_size)
    check_token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    for position, word in enumerate(serve.bad_words):
        check_token_ids(f"bad_words[{position}].ids", word.ids, vocab_size)
    check_token_ids("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)
    for position, choice in enumerate(serve.request.resume.choices):
        check_token_ids(f"resume.choices[{position}].token_ids", choice.token_ids, vocab_size)
    for token_id in sampling.logit_bias:
        if token_id >= vocab_size:
            message = f"the token id must be below the vocabulary's size, {vocab_size}"
            raise InvalidArgument(f"sampling.logit_bias[{token_id}]", message)


def _max_tokens(num_prompt_tokens: int, stopping: inference_pb2.Stopping, max_model_len: int) -> int:
    """Return how many tokens may come out: what was asked for, or what the context still holds."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise InvalidArgument(
            "prompt", f"{num_prompt_tokens} tokens, the limit is {max_model_len} with at least one token of output"
        )
    if not stopping.HasField("max_tokens"):
        if stopping.min_tokens > room:
            message = f"must be at most {room}, what the context holds after the prompt, got {stopping.min_tokens}"
            raise InvalidArgument("stopping.min_tokens", message)
        return room
    if stopping.max_tokens > room:
        raise InvalidArgument(
            "stopping.max_tokens",
            f"{stopping.max_tokens} tokens after a prompt of {num_prompt_tokens} exceed the limit, {max_model_len}",
        )
    return stopping.max_tokens


def _check_progress(resume: inference_pb2.Resume, max_tokens: int) -> None:
    for position, choice in enumerate(resume.choices):
        if len(choice.token_ids) > max_tokens:
            message = f"must hold at most {max_tokens} ids, what may come out in all, got {len(choice.token_ids)}"
            raise InvalidArgument(f"resume.choices[{position}].token_ids", message)
