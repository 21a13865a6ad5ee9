"""What an AddRequest may say. Front doors have checked it; one that did not would bring down everybody's engine."""

from __future__ import annotations

from kvern.engine.errors import RequestRefused
from kvern.services.runtime.errors import InvalidArgument, Unsupported
from kvern.services.runtime.validate import MAX_AGE_S, MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, check_generate
from kvern.v1 import engine_pb2
from kvern.v1.inference_pb2 import GenerateRequest, Output, TokenIds

_MAX_SPELLINGS = 2 * MAX_BAD_WORDS
"""Each word is told as a text begins with it, and as it follows a space."""

_MAX_SPELLING_IDS = 4 * (MAX_BAD_WORD_CHARS + 1)
"""A token for each byte, with the space."""


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
    _check_bad_words(add)
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


def _check_bad_words(add: engine_pb2.AddRequest) -> None:
    """The device holds a table of as many rows as there are words, each as long as the longest, for every request."""
    longest = max((len(word.ids) for word in add.bad_words), default=0)
    if len(add.bad_words) > _MAX_SPELLINGS or longest > _MAX_SPELLING_IDS:
        message = (
            f"at most {_MAX_SPELLINGS} sequences of {_MAX_SPELLING_IDS} ids, got {len(add.bad_words)} of {longest}"
        )
        raise RequestRefused("sampling.bad_words", message)


def _check_resumed(add: engine_pb2.AddRequest) -> None:
    num_choices = add.sampling.n if add.sampling.HasField("n") else 1
    indices = [choice.index for choice in add.resumed]
    if len(set(indices)) < len(indices) or max(indices, default=0) >= num_choices:
        raise RequestRefused("resume", f"each choice at most once, and below sampling.n, which is {num_choices}")
