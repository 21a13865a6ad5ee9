"""From what clients ask to what the tokenizer and replicas are asked."""

from __future__ import annotations

import random

from kvern.services.router.convert import to_encode, to_serve
from kvern.v1.inference_pb2 import ChoiceProgress, GenerateRequest, Output, Resume, Sampling, TokenIds
from kvern.v1.tokenizer_pb2 import EncodePromptResponse


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
