"""Protobuf messages to engine objects and back, once, here."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvern.engine.errors import RequestRefused
from kvern.engine.grammar import Grammar
from kvern.engine.plan import ChoiceEnded, Load, PromptLogprobs, TokenLogprobs
from kvern.engine.request import CacheParams, FinishReason, GrammarState, Request, SamplingParams, StoppingParams
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: inference_pb2.FINISH_REASON_ERROR,
}

_NUMBER_BITS = 20

MAX_PIECE_BYTES = 2**20
"""Of prompt log-probabilities in one message."""

_MAX_PIECE_HEADER_BYTES = 18
_MAX_ITEM_HEADER_BYTES = 6
"""What id and start take, and the field number and length of an item."""


def to_requests(
    add: engine_pb2.AddRequest,
    *,
    request_ids: Sequence[int],
    arrival: int,
    default_seed: int,
    vocab_size: int,
    grammar: Grammar | None = None,
) -> list[Request]:
    """Build the engine's requests, one for each of `choices_of`, in order; `request_ids` are theirs and increase,
    `arrival` is that of all of them.

    Raises RequestRefused for token ids that the model does not have, and for resumed output that leaves nothing to
    generate or that its grammar does not allow.
    """
    prompt = list(add.prompt_token_ids)
    _check_token_ids(add, vocab_size)
    stopping, sampling = _stopping(add.stopping), _sampling(add, default_seed)
    resumed = {each.index: list(each.token_ids) for each in add.resumed}
    requests: list[Request] = []
    for choice, request_id in zip(choices_of(add), request_ids, strict=True):
        output = resumed.get(choice, [])
        if output and len(output) >= stopping.max_tokens:
            raise RequestRefused(
                "resume", f"choice {choice} has {len(output)} tokens, max_tokens is {stopping.max_tokens}"
            )
        request = Request(
            request_id=request_id,
            token_ids=prompt + output,
            num_prompt_tokens=len(prompt),
            sampling=replace(sampling, seed=choice_seed(sampling.seed, choice)),
            stopping=stopping,
            cache=CacheParams(add.cache.salt, add.cache.no_store, add.cache.bypass),
            prompt_logprobs=add.prompt_logprobs if not requests and add.HasField("prompt_logprobs") else None,
            priority=add.priority,
            arrival=arrival,
            choice=choice,
            grammar=None if grammar is None else _replay(grammar, output),
            fork_of=requests[0] if requests else None,
        )
        requests.append(request)
    return requests


def arrival_of(add: engine_pb2.AddRequest, number: int, now_s: float) -> int:
    """Return a request's place in the order of arrival: microseconds of a clock, then its number: no two are equal."""
    return round((now_s - add.age_s) * 1e6) << _NUMBER_BITS | number % (1 << _NUMBER_BITS)


def choices_of(add: engine_pb2.AddRequest) -> list[int]:
    """Return the choices to run, in order: all, or those that go on after what they had."""
    if add.resumed:
        return sorted(each.index for each in add.resumed)
    return list(range(add.sampling.n if add.sampling.HasField("n") else 1))


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a choice: the request's for choice 0, a 64-bit hash of both for others.

    So choice i of a request is what a request of its own with this seed would give.
    """
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(struct.pack("<QI", seed, choice), digest_size=8).digest(), "little")


def _replay(grammar: Grammar, output: Sequence[int]) -> GrammarState:
    state = grammar.start()
    if not all(map(state.advance, output)):
        raise RequestRefused("resume", f"the output so far does not match the constraint: {state.error}")
    return state


def _check_token_ids(add: engine_pb2.AddRequest, vocab_size: int) -> None:
    given: tuple[tuple[str, Iterable[int]], ...] = (
        ("token_ids", add.prompt_token_ids),
        ("sampling.logit_bias", add.sampling.logit_bias),
        ("sampling.allowed_token_ids", add.sampling.allowed_token_ids),
        ("sampling.bad_words", (token_id for word in add.bad_words for token_id in word.ids)),
        ("stopping.stop_token_ids", add.stopping.stop_token_ids),
        ("resume", (token_id for choice in add.resumed for token_id in choice.token_ids)),
    )
    for field, token_ids in given:
        greatest = max(token_ids, default=0)
        if greatest >= vocab_size:
            raise RequestRefused(field, f"token id {greatest} is not below the vocabulary's size, {vocab_size}")


def _sampling(add: engine_pb2.AddRequest, default_seed: int) -> SamplingParams:
    sampling = add.sampling
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        seed=sampling.seed if sampling.HasField("seed") else default_seed,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in add.bad_words if word.ids),
        logprobs=add.logprobs if add.HasField("logprobs") else None,
    )


def _stopping(stopping: inference_pb2.Stopping) -> StoppingParams:
    return StoppingParams(
        max_tokens=stopping.max_tokens,
        stop_token_ids=frozenset(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        min_tokens=stopping.min_tokens,
    )


def to_token_logprobs(logprobs: TokenLogprobs, entry: int = 0) -> engine_pb2.EngineTokenLogprobs:
    return engine_pb2.EngineTokenLogprobs(
        entry=entry,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def to_prompt_logprobs(told: PromptLogprobs, stream_id: int) -> Iterator[engine_pb2.EnginePromptLogprobs]:
    """Cut one step's items into messages of at most MAX_PIECE_BYTES, or of one item."""
    piece, num_bytes = engine_pb2.EnginePromptLogprobs(id=stream_id, start=told.start), 0
    for position, logprobs in enumerate(told.items, start=told.start):
        item = to_token_logprobs(logprobs)
        item_bytes = item.ByteSize() + _MAX_ITEM_HEADER_BYTES
        if piece.items and num_bytes + item_bytes > MAX_PIECE_BYTES - _MAX_PIECE_HEADER_BYTES:
            yield piece
            piece, num_bytes = engine_pb2.EnginePromptLogprobs(id=stream_id, start=position), 0
        piece.items.append(item)
        num_bytes += item_bytes
    if piece.items:
        yield piece


def to_choice_end(ended: ChoiceEnded, stream_id: int, choice: int) -> engine_pb2.ChoiceEnd:
    return engine_pb2.ChoiceEnd(
        id=stream_id,
        index=choice,
        reason=_REASONS[ended.reason],
        stop_token_id=ended.stop_token_id,
        preemptions=ended.preemptions,
        error=ended.error,
        error_reason=ended.error_reason,
    )


def to_load(load: Load) -> replica_pb2.ReplicaLoad:
    return replica_pb2.ReplicaLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_used_blocks=load.num_used_blocks,
        queued_prefill_tokens=load.queued_prefill_tokens,
        num_failed_choices=load.num_failed_choices,
    )
