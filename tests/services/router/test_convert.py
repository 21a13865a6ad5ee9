"""From what clients ask to what the tokenizer and replicas are asked."""

from __future__ import annotations

import random

from kvern.services.router.convert import reads_cache, to_encode, to_serve, writes_cache
from kvern.services.router.models import Contract
from kvern.v1.inference_pb2 import Cache, ChoiceProgress, GenerateRequest, Output, Resume, Sampling, TokenIds
from kvern.v1.tokenizer_pb2 import BlockHashing, EncodePromptResponse


def test_bad_words_go_to_the_tokenizer_and_come_to_the_replica_as_token_ids() -> None:
    request = GenerateRequest(text="Hello", sampling=Sampling(bad_words=["no", "never"], logit_bias={3: 1.0}))
    assert list(to_encode(request, "m").bad_words) == ["no", "never"]
    encoded = EncodePromptResponse(token_ids=[7], bad_words=[TokenIds(ids=[1, 2]), TokenIds(ids=[3])])
    serve = to_serve(request, "id", "m", encoded, random.Random(0))
    assert serve.bad_words == encoded.bad_words
    assert list(serve.request.token_ids.ids) == [7]
    assert serve.request.sampling.logit_bias == {3: 1.0}


def test_resumed_stream_goes_on_with_its_seed_and_progress() -> None:
    resume = Resume(seed=2**64 - 1, choices=[ChoiceProgress(index=0, token_ids=[5], text_bytes=3)])
    request = GenerateRequest(text="Hello", output=Output(logprobs=0, prompt_logprobs=2, echo=True), resume=resume)
    serve = to_serve(request, "id", "m", EncodePromptResponse(token_ids=[7]), random.Random(0))
    assert serve.request.sampling.seed == 2**64 - 1
    assert (serve.request.resume, serve.request.output) == (resume, request.output)


def test_digests_are_asked_for_under_each_contract_with_the_salt() -> None:
    request = GenerateRequest(text="Hello", cache=Cache(salt="tenant"), adapter="lora")
    encode = to_encode(request, "m", [Contract("old", 16), Contract("new", 32)])
    assert list(encode.hashings) == [
        BlockHashing(contract="old", block_size=16, salt="tenant", adapter="lora"),
        BlockHashing(contract="new", block_size=32, salt="tenant", adapter="lora"),
    ]
    assert not to_encode(request, "m").hashings


def test_cache_is_read_and_written_as_the_request_says() -> None:
    def uses(**fields: object) -> tuple[bool, bool]:
        request = GenerateRequest(**fields)  # type: ignore[arg-type]
        return reads_cache(request), writes_cache(request)

    assert uses() == (True, True)
    assert uses(cache=Cache(no_store=True)) == (True, False)
    assert uses(cache=Cache(bypass=True)) == (False, False)
    assert uses(output=Output(prompt_logprobs=0)) == (False, True)
