"""Every rule of the contract about a request, checked on the request alone."""

from __future__ import annotations

import math

import pytest

from kvern.services.runtime import validate
from kvern.services.runtime.errors import InvalidArgument, Unsupported
from kvern.services.runtime.validate import check_generate
from kvern.v1.inference_pb2 import (
    Cache,
    Chat,
    ChatMessage,
    ChoiceProgress,
    Choices,
    Constraint,
    GenerateRequest,
    Output,
    Resume,
    Sampling,
    Stopping,
    TokenIds,
)


def _request(**fields: object) -> GenerateRequest:
    return GenerateRequest(**({"text": "Hello"} | fields))  # type: ignore[arg-type]


def _chat(*messages: ChatMessage, **fields: object) -> GenerateRequest:
    return GenerateRequest(chat=Chat(messages=messages, **fields))  # type: ignore[arg-type]


_USER = ChatMessage(role="user", content="Hello")

_ACCEPTED = {
    "text": _request(),
    "ids": GenerateRequest(token_ids=TokenIds(ids=[1])),
    "chat": _chat(_USER),
    "chat with absent content": _chat(ChatMessage(role="assistant")),
    "chat with JSON": _chat(_USER, tools_json="[]", template_kwargs_json="{}"),
    "continued chat": _chat(ChatMessage(role="assistant", content="It"), continue_final_message=True),
    "sampling at its bounds": _request(
        sampling=Sampling(temperature=0, top_p=1, top_k=2**32 - 1, seed=2**64 - 1, n=1, min_p=0)
    ),
    "penalties": _request(sampling=Sampling(presence_penalty=2, frequency_penalty=-2, repetition_penalty=0.1)),
    "masks": _request(
        sampling=Sampling(
            min_p=1,
            logit_bias={1: -100.0, 2: 100.0},
            allowed_token_ids=[1],
            bad_words=["x" * validate.MAX_BAD_WORD_CHARS] * validate.MAX_BAD_WORDS,
        )
    ),
    "choices": _request(sampling=Sampling(n=validate.MAX_CHOICES)),
    "min_tokens": _request(stopping=Stopping(max_tokens=5, min_tokens=5)),
    "hints": _request(session_id="s", priority=-7),
    "cache": _request(cache=Cache(salt="tenant", no_store=True, bypass=True), keep_last_tokens=1),
    "stopping": _request(
        stopping=Stopping(max_tokens=1, stop=["end"], stop_token_ids=[2**32 - 1], ignore_eos=True, include_stop=True)
    ),
    "output": _request(output=Output(token_ids=True, skip_special_tokens=False)),
    "log-probabilities": _request(
        output=Output(logprobs=validate.MAX_LOGPROBS, prompt_logprobs=validate.MAX_LOGPROBS),
        stopping=Stopping(max_tokens=0),
    ),
    "echo": _request(output=Output(echo=True), stopping=Stopping(max_tokens=0)),
    "resume": _request(
        sampling=Sampling(n=3),
        stopping=Stopping(max_tokens=2),
        resume=Resume(seed=7, choices=[ChoiceProgress(index=2, token_ids=[1, 2], text_bytes=5), ChoiceProgress()]),
    ),
    "resume with the seed it had": _request(
        sampling=Sampling(seed=7), resume=Resume(seed=7, choices=[ChoiceProgress()])
    ),
}


@pytest.mark.parametrize("request_", _ACCEPTED.values(), ids=_ACCEPTED.keys())
def test_check_request_within_limits_passes(request_: GenerateRequest) -> None:
    check_generate(request_)


_REFUSED = [
    ("prompt", GenerateRequest()),
    ("text", GenerateRequest(text="")),
    ("token_ids.ids", GenerateRequest(token_ids=TokenIds())),
    ("keep_last_tokens", _request(keep_last_tokens=0)),
    ("chat.messages", _chat()),
    ("chat.messages[1].role", _chat(_USER, ChatMessage(content="Hello"))),
    ("chat.tools_json", _chat(_USER, tools_json="{}")),
    ("chat.tools_json", _chat(_USER, tools_json="[")),
    ("chat.tools_json", _chat(_USER, tools_json="[" * 1000 + "]" * 1000)),
    ("chat.tools_json", _chat(_USER, tools_json=r'["\ud800"]')),
    ("chat.tools_json", _chat(_USER, tools_json="[" + " " * validate.MAX_CHAT_JSON_CHARS + "]")),
    ("chat.template_kwargs_json", _chat(_USER, template_kwargs_json="[]")),
    ("chat.messages[0].tool_calls_json", _chat(ChatMessage(role="assistant", tool_calls_json="nonsense"))),
    ("chat.messages[0].content_parts_json", _chat(ChatMessage(role="user", content_parts_json='"x"'))),
    ("chat.messages[0].content_parts_json", _chat(ChatMessage(role="user", content="", content_parts_json="[]"))),
    ("chat.continue_final_message", _chat(_USER, continue_final_message=True)),
    (
        "chat.add_generation_prompt",
        _chat(ChatMessage(role="assistant"), continue_final_message=True, add_generation_prompt=True),
    ),
    ("sampling.temperature", _request(sampling=Sampling(temperature=-1))),
    ("sampling.temperature", _request(sampling=Sampling(temperature=math.nan))),
    ("sampling.temperature", _request(sampling=Sampling(temperature=math.inf))),
    ("sampling.top_p", _request(sampling=Sampling(top_p=0))),
    ("sampling.top_p", _request(sampling=Sampling(top_p=-0.1))),
    ("sampling.top_p", _request(sampling=Sampling(top_p=1.1))),
    ("sampling.top_p", _request(sampling=Sampling(top_p=math.nan))),
    ("sampling.min_p", _request(sampling=Sampling(min_p=1.1))),
    ("sampling.presence_penalty", _request(sampling=Sampling(presence_penalty=2.1))),
    ("sampling.frequency_penalty", _request(sampling=Sampling(frequency_penalty=-2.1))),
    ("sampling.repetition_penalty", _request(sampling=Sampling(repetition_penalty=0))),
    ("sampling.n", _request(sampling=Sampling(n=0))),
    ("sampling.n", _request(sampling=Sampling(n=validate.MAX_CHOICES + 1))),
    ("sampling.logit_bias[5]", _request(sampling=Sampling(logit_bias={5: 100.5}))),
    ("sampling.logit_bias[5]", _request(sampling=Sampling(logit_bias={5: math.nan}))),
    ("sampling.logit_bias", _request(sampling=Sampling(logit_bias=dict.fromkeys(range(1025), 1.0)))),
    ("sampling.bad_words[0]", _request(sampling=Sampling(bad_words=[""]))),
    ("sampling.bad_words[0]", _request(sampling=Sampling(bad_words=["x" * (validate.MAX_BAD_WORD_CHARS + 1)]))),
    ("sampling.bad_words", _request(sampling=Sampling(bad_words=["x"] * (validate.MAX_BAD_WORDS + 1)))),
    ("stopping.max_tokens", _request(stopping=Stopping(max_tokens=0))),
    ("stopping.min_tokens", _request(stopping=Stopping(max_tokens=1, min_tokens=2))),
    ("stopping.stop", _request(stopping=Stopping(stop=["x"] * (validate.MAX_STOP_STRINGS + 1)))),
    ("stopping.stop[0]", _request(stopping=Stopping(stop=["x" * (validate.MAX_STOP_CHARS + 1)]))),
    ("stopping.stop_token_ids", _request(stopping=Stopping(stop_token_ids=[1] * 1025))),
    ("output.logprobs", _request(output=Output(logprobs=validate.MAX_LOGPROBS + 1))),
    ("output.prompt_logprobs", _request(output=Output(prompt_logprobs=2**32 - 1))),
    ("resume.choices", _request(resume=Resume(seed=7))),
    ("resume.seed", _request(sampling=Sampling(seed=8), resume=Resume(seed=7, choices=[ChoiceProgress()]))),
    ("resume.choices[0].index", _request(resume=Resume(choices=[ChoiceProgress(index=1)]))),
    (
        "resume.choices[1].index",
        _request(sampling=Sampling(n=2), resume=Resume(choices=[ChoiceProgress(index=1), ChoiceProgress(index=1)])),
    ),
    (
        "resume.choices[0].token_ids",
        _request(stopping=Stopping(max_tokens=1), resume=Resume(choices=[ChoiceProgress(token_ids=[1, 2])])),
    ),
    ("constraint", _request(constraint=Constraint())),
    ("constraint.regex", _request(constraint=Constraint(regex=""))),
    ("constraint.grammar", _request(constraint=Constraint(grammar="x" * (validate.MAX_CONSTRAINT_CHARS + 1)))),
    ("constraint.json_schema", _request(constraint=Constraint(json_schema="{"))),
    ("constraint.json_schema", _request(constraint=Constraint(json_schema="true"))),
    ("constraint.structural_tag", _request(constraint=Constraint(structural_tag="[]"))),
    ("constraint.json_object", _request(constraint=Constraint(json_object=False))),
    ("constraint.choices.values", _request(constraint=Constraint(choices=Choices()))),
    ("constraint.choices.values", _request(constraint=Constraint(choices=Choices(values=["x"] * 4097)))),
    ("constraint.choices.values[1]", _request(constraint=Constraint(choices=Choices(values=["x", ""])))),
    ("constraint.choices.values", _request(constraint=Constraint(choices=Choices(values=["x" * 2**16] * 5)))),
    ("request_id", _request(request_id="x" * 257)),
    ("model", _request(model="x" * 257)),
    ("session_id", _request(session_id="x" * 257)),
    ("cache.salt", _request(cache=Cache(salt="x" * 257))),
]


@pytest.mark.parametrize(("field", "request_"), _REFUSED, ids=[f"{i}-{row[0]}" for i, row in enumerate(_REFUSED)])
def test_check_request_beyond_a_limit_names_the_field(field: str, request_: GenerateRequest) -> None:
    """D05, D13, A14 among them."""
    with pytest.raises(InvalidArgument) as refused:
        check_generate(request_)
    assert refused.value.field == field
    assert refused.value.message.startswith(f"{field}: ")


def test_check_value_beyond_a_limit_names_limit_and_value() -> None:
    with pytest.raises(InvalidArgument, match=r"sampling\.top_p: must be in \(0, 1\], got 1\.5"):
        check_generate(_request(sampling=Sampling(top_p=1.5)))


def test_check_too_many_alternatives_names_the_limit() -> None:
    with pytest.raises(InvalidArgument, match=r"output\.logprobs: must be at most 64, got 65"):
        check_generate(_request(output=Output(logprobs=65)))


def test_check_empty_stop_string_is_refused() -> None:
    """A14."""
    with pytest.raises(InvalidArgument, match=r"stopping\.stop\[1\]: must not be an empty string"):
        check_generate(_request(stopping=Stopping(stop=["end", ""])))


_UNSUPPORTED = {"adapter": _request(adapter="lora")}


@pytest.mark.parametrize(("field", "request_"), _UNSUPPORTED.items(), ids=_UNSUPPORTED.keys())
def test_check_field_not_implemented_is_refused_by_name(field: str, request_: GenerateRequest) -> None:
    with pytest.raises(Unsupported) as refused:
        check_generate(request_)
    assert refused.value.field == field


def test_check_every_field_of_the_contract_is_known_here() -> None:
    """A field added to the contract is supported, refused, or it fails here: never silently ignored."""
    known = {
        GenerateRequest.DESCRIPTOR: {
            "request_id", "model", "text", "token_ids", "chat", "sampling", "stopping", "output", "cache", "constraint",
            "priority", "adapter", "session_id", "add_special_tokens", "keep_last_tokens", "resume",
        },
        Sampling.DESCRIPTOR: {
            "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "seed", "n", "logit_bias", "allowed_token_ids", "bad_words",
        },
        Stopping.DESCRIPTOR: {"max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop"},
        Output.DESCRIPTOR: {"logprobs", "prompt_logprobs", "token_ids", "skip_special_tokens", "echo"},
        Cache.DESCRIPTOR: {"salt", "no_store", "bypass"},
    }  # fmt: skip
    for descriptor, fields in known.items():
        assert set(descriptor.fields_by_name) == fields
