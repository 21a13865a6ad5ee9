"""From what clients ask to what the tokenizer and replicas are asked."""

from __future__ import annotations

import random
from collections.abc import Iterable

from kvern.services.router.models import Contract
from kvern.v1 import inference_pb2, replica_pb2, tokenizer_pb2


def to_encode(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
    model: str,
    contracts: Iterable[Contract] = (),
    scope: str = "",
) -> tokenizer_pb2.EncodePromptRequest:
    """Ask for a prompt's token ids, and for the digests of its blocks under each contract.

    scope: of texts that come without a salt, by which the others are kept apart.
    """
    encode = tokenizer_pb2.EncodePromptRequest(model=model, scope=scope)
    if request.HasField("text"):
        encode.text = request.text
    elif request.HasField("chat"):
        encode.chat.CopyFrom(request.chat)
    elif isinstance(request, inference_pb2.GenerateRequest):
        encode.token_ids.CopyFrom(request.token_ids)
    if request.HasField("add_special_tokens"):
        encode.add_special_tokens = request.add_special_tokens
    if isinstance(request, inference_pb2.GenerateRequest):
        encode.scope = request.cache.salt
        encode.bad_words.extend(request.sampling.bad_words)
        if request.HasField("keep_last_tokens"):
            encode.keep_last_tokens = request.keep_last_tokens
        for contract in contracts:
            encode.hashings.add(
                contract=contract.fingerprint,
                block_size=contract.block_size,
                salt=request.cache.salt,
                adapter=request.adapter,
            )
    return encode


def num_resumed_tokens(request: inference_pb2.GenerateRequest) -> int:
    """Return how many tokens, beside its prompt's, are computed before a stream that is resumed goes on."""
    return sum(len(choice.token_ids) for choice in request.resume.choices)


def reads_cache(request: inference_pb2.GenerateRequest) -> bool:
    """Whether a replica may reuse blocks for it. Log-probabilities of the prompt need every position computed."""
    return not request.cache.bypass and not request.output.HasField("prompt_logprobs")


def writes_cache(request: inference_pb2.GenerateRequest) -> bool:
    """Whether it leaves blocks behind for others."""
    return not request.cache.bypass and not request.cache.no_store


def to_decode(request: inference_pb2.DetokenizeRequest, model: str) -> tokenizer_pb2.DecodeTokensRequest:
    """Ask for the text of token ids."""
    decode = tokenizer_pb2.DecodeTokensRequest(model=model, token_ids=request.ids)
    if request.HasField("skip_special_tokens"):
        decode.skip_special_tokens = request.skip_special_tokens
    return decode


def to_serve(
    request: inference_pb2.GenerateRequest,
    request_id: str,
    model: str,
    encoded: tokenizer_pb2.EncodePromptResponse,
    rng: random.Random,
) -> replica_pb2.ServeRequest:
    """Complete a client's request for a replica: its id, model, seed and token ids are set.

    A stream that is resumed goes on with the seed it had.
    """
    serve = replica_pb2.ServeRequest(request=request, bad_words=encoded.bad_words)
    completed = serve.request
    completed.request_id = request_id
    completed.model = model
    completed.ClearField("prompt")
    completed.token_ids.ids.extend(encoded.token_ids)
    if request.HasField("resume"):
        completed.sampling.seed = request.resume.seed
    elif not request.sampling.HasField("seed"):
        completed.sampling.seed = rng.getrandbits(64)
    return serve
