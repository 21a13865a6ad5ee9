"""What an AddRequest may say. Front doors have checked it; one that did not would bring down everybody's engine."""

from __future__ import annotations

from kvern.engine.errors import RequestRefused
from kvern.services.runtime.errors import InvalidArgument, Unsupported
from kvern.services.runtime.validate import MAX_AGE_S, check_generate
from kvern.v1 import engine_pb2
from kvern.v1.inference_pb2 import GenerateRequest, Output, TokenIds


def check_add(add: engine_pb2.AddRequest) -> None:
    """Check what can be known without the model. Raises RequestRefused."""
    try:
        check_generate(_as_generate(add))
    except (InvalidArgument, Unsupported) as error:
        raise RequestRefused(error.field, error.message.removeprefix(f"{error.field}: ")) from error
    if not add.prompt_token_ids:
        raise RequestRefused("token_ids", "the prompt has no tokens")
    if not add.stopping.HasField("max_tokens"):
        raise RequestRefused("stopping.max_tokens", "must be set")
    if not 0 <= add.age_s <= MAX_AGE_S:
        raise RequestRefused("", f"age_s must be in [0, {MAX_AGE_S:g}], got {add.age_s:g}")
    _check_resumed(add)


def _as_generate(add: engine_pb2.AddRequest) -> GenerateRequest:
    """Return the client's request as far as it is here, but with a short prompt and an echo, without which no tokens of
    output would be too few."""
    return GenerateRequest(
        token_ids=TokenIds(ids=[0]),
        sampling=add.sampling,
        stopping=add.stopping,
        output=Output(
            logprobs=add.logprobs if add.HasField("logprobs") else None,
            prompt_logprobs=add.prompt_logprobs if add.HasField("prompt_logprobs") else None,
            echo=True,
        ),
        cache=add.cache,
        adapter=add.adapter,
        constraint=add.constraint if add.HasField("constraint") else None,
    )


def _check_resumed(add: engine_pb2.AddRequest) -> None:
    num_choices = add.sampling.n if add.sampling.HasField("n") else 1
    indices = [choice.index for choice in add.resumed]
    if len(set(indices)) < len(indices) or max(indices, default=0) >= num_choices:
        raise RequestRefused("resume", f"each choice at most once, and below sampling.n, which is {num_choices}")
