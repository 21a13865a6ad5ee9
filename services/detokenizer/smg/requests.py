"""From what SMG asks to what a replica is asked. Zeros of fields that cannot be absent mean their defaults."""

from __future__ import annotations

import random

from smg_grpc_proto import vllm_engine_pb2

from kvern.services.runtime.errors import InvalidArgument, Unsupported
from kvern.v1 import inference_pb2, replica_pb2

MAX_GATHERED_BYTES = 64 * 2**20
"""Of log-probabilities that are told in one message: a prompt's, and all of an answer that is not streamed."""

_LOGPROB_BYTES = 9
"""What one takes at most, with its token id."""

_UNSUPPORTED = (
    "kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs"
)  # fmt: skip


def to_generate_request(
    request: vllm_engine_pb2.GenerateRequest, info: replica_pb2.EngineInfo, request_id: str, salt: str
) -> inference_pb2.GenerateRequest:
    """Convert a request; its prompt stays text where it is text. Ranges are not checked here.

    Raises InvalidArgument for what cannot be converted, Unsupported for what replicas do not do.
    """
    _refuse_unsupported(request)
    params = request.sampling_params
    generate = inference_pb2.GenerateRequest(
        request_id=request_id,
        model=info.model,
        sampling=_sampling(params),
        stopping=_stopping(params),
        output=_output(params),
        cache=inference_pb2.Cache(salt=salt),
    )
    if request.HasField("tokenized"):
        generate.token_ids.ids.extend(request.tokenized.input_ids)
    elif request.HasField("text"):
        generate.text = request.text
    if params.HasField("truncate_prompt_tokens"):
        generate.keep_last_tokens = _kept_tokens(params, info.max_model_len)
    _set_constraint(generate, params)
    return generate


def truncate_prompt(generate: inference_pb2.GenerateRequest) -> None:
    """Keep of a prompt's ids those that the request says."""
    if generate.HasField("keep_last_tokens"):
        del generate.token_ids.ids[: -generate.keep_last_tokens]


def check_gathered(generate: inference_pb2.GenerateRequest, max_model_len: int, *, streams: bool) -> None:
    """Raise InvalidArgument where the log-probabilities that are told in one message could be too many."""
    output, num_prompt_tokens = generate.output, len(generate.token_ids.ids)
    count = num_prompt_tokens * (output.prompt_logprobs + 1) if output.HasField("prompt_logprobs") else 0
    if output.HasField("logprobs") and not streams:
        stopping = generate.stopping
        num_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else max_model_len - num_prompt_tokens
        count += generate.sampling.n * num_tokens * (output.logprobs + 1)
    if (num_bytes := count * _LOGPROB_BYTES) > MAX_GATHERED_BYTES:
        message = f"log-probabilities told in one message may take {MAX_GATHERED_BYTES} bytes, these {num_bytes}"
        raise InvalidArgument("sampling_params.logprobs", f"{message}; ask for a stream, fewer tokens or fewer of them")


def check_rank(field: str, rank: int) -> None:
    """Raise InvalidArgument for a rank that there is not."""
    if rank != 0:
        raise InvalidArgument(field, f"a replica has rank 0 only, got {rank}")


def _refuse_unsupported(request: vllm_engine_pb2.GenerateRequest) -> None:
    given = {descriptor.name for descriptor, _ in request.ListFields()}
    for field in _UNSUPPORTED:
        if field in given:
            raise Unsupported(field, "replicas take no media and no KV from elsewhere")
    check_rank("data_parallel_rank", request.data_parallel_rank)


def _sampling(params: vllm_engine_pb2.SamplingParams) -> inference_pb2.Sampling:
    sampling = inference_pb2.Sampling(
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        n=params.n or 1,
        seed=params.seed % 2**64 if params.HasField("seed") else random.getrandbits(64),
    )
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    if params.top_p:
        sampling.top_p = params.top_p
    if params.repetition_penalty:
        sampling.repetition_penalty = params.repetition_penalty
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            raise InvalidArgument("sampling_params.logit_bias", f"token ids must not be negative, got {token_id}")
        sampling.logit_bias[token_id] = bias
    return sampling


def _stopping(params: vllm_engine_pb2.SamplingParams) -> inference_pb2.Stopping:
    return inference_pb2.Stopping(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop=params.include_stop_str_in_output,
    )


def _output(params: vllm_engine_pb2.SamplingParams) -> inference_pb2.Output:
    return inference_pb2.Output(
        token_ids=True,
        skip_special_tokens=params.skip_special_tokens,
        logprobs=_num_logprobs(params, "logprobs"),
        prompt_logprobs=_num_logprobs(params, "prompt_logprobs"),
    )


def _num_logprobs(params: vllm_engine_pb2.SamplingParams, field: str) -> int | None:
    if not params.HasField(field):
        return None
    count: int = getattr(params, field)
    if count < 0:
        raise InvalidArgument(f"sampling_params.{field}", f"must be at least 0, got {count}; all cannot be told")
    return count


def _kept_tokens(params: vllm_engine_pb2.SamplingParams, max_model_len: int) -> int:
    count: int = params.truncate_prompt_tokens
    if count == -1:
        # What the model takes, with room for the answer.
        num_output_tokens: int = params.max_tokens
        return max(1, max_model_len - max(1, num_output_tokens))
    if count < 1:
        raise InvalidArgument("sampling_params.truncate_prompt_tokens", f"must be -1 or at least 1, got {count}")
    return count


def _set_constraint(generate: inference_pb2.GenerateRequest, params: vllm_engine_pb2.SamplingParams) -> None:
    kind = params.WhichOneof("constraint")
    if kind == "choice":
        generate.constraint.choices.SetInParent()
        generate.constraint.choices.values.extend(params.choice.choices)
    elif kind is not None:
        setattr(generate.constraint, kind, getattr(params, kind))
