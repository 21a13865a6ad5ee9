"""Log-probabilities as clients get them: each token with its own bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvern.services.detokenizer.choice import Choice
from kvern.services.detokenizer.token_bytes import TokenBytes
from kvern.v1 import engine_pb2, inference_pb2


def of_choice(
    choice: Choice,
    token_ids: Sequence[int],
    told: Sequence[engine_pb2.EngineTokenLogprobs],
    token_bytes: TokenBytes,
) -> list[inference_pb2.TokenLogprobs]:
    """Convert those of a choice's next tokens. Joined, their bytes are its text's, as far as these are characters.

    Alternatives have the bytes that they would have added. What a stop string or stop token cut off is told too.
    """
    converted = []
    for token_id, each in zip(token_ids, told, strict=False):
        bytes_of = token_bytes.first if choice.begins_text else token_bytes.__getitem__
        converted.append(_convert(token_id, each, bytes_of))
        choice.begins_text = choice.begins_text and not token_bytes[token_id]
    return converted


def of_prompt(
    prompt: Sequence[int], told: engine_pb2.EnginePromptLogprobs, token_bytes: TokenBytes
) -> Iterator[inference_pb2.TokenLogprobs]:
    """Convert those of successive tokens of a prompt."""
    for position, each in enumerate(told.items, start=told.start):
        yield _convert(prompt[position], each, token_bytes.__getitem__)


def _convert(
    token_id: int, told: engine_pb2.EngineTokenLogprobs, bytes_of: Callable[[int], bytes]
) -> inference_pb2.TokenLogprobs:
    converted = inference_pb2.TokenLogprobs(
        sampled=inference_pb2.TokenLogprob(
            token_id=token_id, logprob=told.logprob, token=bytes_of(token_id), rank=told.rank
        )
    )
    for rank, (top_id, logprob) in enumerate(zip(told.top_ids, told.top_logprobs, strict=True), start=1):
        converted.top.add(token_id=top_id, logprob=logprob, token=bytes_of(top_id), rank=rank)
    return converted
