"""Protobuf messages to engine objects and back, once, here."""

from __future__ import annotations

from kvern.engine.errors import RequestRefused
from kvern.engine.plan import ChoiceEnded, Load
from kvern.engine.request import CacheParams, FinishReason, Request, SamplingParams, StoppingParams
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: inference_pb2.FINISH_REASON_ERROR,
}


def to_request(
    add: engine_pb2.AddRequest, *, request_id: int, arrival: int, default_seed: int, vocab_size: int
) -> Request:
    """Build the engine's request.

    Ranges were checked at the front door. Only what would bring the whole engine down is checked again: raises
    RequestRefused for a prompt without tokens, or with one that the model does not have.
    """
    prompt = list(add.prompt_token_ids)
    if not prompt:
        raise RequestRefused("token_ids", "the prompt has no tokens")
    if max(prompt) >= vocab_size:
        raise RequestRefused("token_ids", f"token id {max(prompt)} is not below the vocabulary's size, {vocab_size}")
    return Request(
        request_id=request_id,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=_sampling(add.sampling, default_seed),
        stopping=_stopping(add.stopping),
        cache=CacheParams(add.cache.salt, add.cache.no_store, add.cache.bypass),
        priority=add.priority,
        arrival=arrival,
    )


def _sampling(sampling: inference_pb2.Sampling, default_seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        seed=sampling.seed if sampling.HasField("seed") else default_seed,
    )


def _stopping(stopping: inference_pb2.Stopping) -> StoppingParams:
    return StoppingParams(
        max_tokens=stopping.max_tokens,
        stop_token_ids=frozenset(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
    )


def to_choice_end(ended: ChoiceEnded, stream_id: int) -> engine_pb2.ChoiceEnd:
    return engine_pb2.ChoiceEnd(
        id=stream_id,
        index=ended.choice,
        reason=_REASONS[ended.reason],
        stop_token_id=ended.stop_token_id,
        preemptions=ended.preemptions,
        error=ended.error,
    )


def to_load(load: Load) -> replica_pb2.ReplicaLoad:
    return replica_pb2.ReplicaLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_used_blocks=load.num_used_blocks,
        queued_prefill_tokens=load.queued_prefill_tokens,
    )
