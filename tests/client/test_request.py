"""Every option reaches its field, and what no request can say is refused before it is sent."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from kvern.client import ChatOptions, Client, GenerateOptions, KvernError
from kvern.client.options import CallOptions
from kvern.client.request import MAX_REQUEST_BYTES, chat_request, generate_request
from kvern.services.runtime.channel import MAX_RECEIVE_BYTES
from kvern.v1 import inference_pb2 as pb

SCHEMA = {"type": "object", "properties": {"ď": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "turn"}}]
USER = {"role": "user", "content": "Hi"}

OPTIONS: dict[str, tuple[Any, pb.GenerateRequest]] = {
    "request_id": ("r", pb.GenerateRequest(request_id="r")),
    "model": ("m", pb.GenerateRequest(model="m")),
    "priority": (-1, pb.GenerateRequest(priority=-1)),
    "adapter": ("a", pb.GenerateRequest(adapter="a")),
    "session_id": ("s", pb.GenerateRequest(session_id="s")),
    "add_special_tokens": (False, pb.GenerateRequest(add_special_tokens=False)),
    "keep_last_tokens": (9, pb.GenerateRequest(keep_last_tokens=9)),
    "temperature": (0.0, pb.GenerateRequest(sampling=pb.Sampling(temperature=0))),
    "top_p": (0.5, pb.GenerateRequest(sampling=pb.Sampling(top_p=0.5))),
    "top_k": (0, pb.GenerateRequest(sampling=pb.Sampling(top_k=0))),
    "min_p": (0.25, pb.GenerateRequest(sampling=pb.Sampling(min_p=0.25))),
    "presence_penalty": (1.0, pb.GenerateRequest(sampling=pb.Sampling(presence_penalty=1))),
    "frequency_penalty": (1.0, pb.GenerateRequest(sampling=pb.Sampling(frequency_penalty=1))),
    "repetition_penalty": (2.0, pb.GenerateRequest(sampling=pb.Sampling(repetition_penalty=2))),
    "seed": (2**64 - 1, pb.GenerateRequest(sampling=pb.Sampling(seed=2**64 - 1))),
    "n": (2, pb.GenerateRequest(sampling=pb.Sampling(n=2))),
    "logit_bias": ({3: -100.0}, pb.GenerateRequest(sampling=pb.Sampling(logit_bias={3: -100}))),
    "allowed_token_ids": ((1, 2), pb.GenerateRequest(sampling=pb.Sampling(allowed_token_ids=[1, 2]))),
    "bad_words": (("x", "y"), pb.GenerateRequest(sampling=pb.Sampling(bad_words=["x", "y"]))),
    "max_tokens": (0, pb.GenerateRequest(stopping=pb.Stopping(max_tokens=0))),
    "min_tokens": (2, pb.GenerateRequest(stopping=pb.Stopping(min_tokens=2))),
    "stop": ("the end", pb.GenerateRequest(stopping=pb.Stopping(stop=["the end"]))),
    "stop_token_ids": ([5], pb.GenerateRequest(stopping=pb.Stopping(stop_token_ids=[5]))),
    "ignore_eos": (True, pb.GenerateRequest(stopping=pb.Stopping(ignore_eos=True))),
    "include_stop": (True, pb.GenerateRequest(stopping=pb.Stopping(include_stop=True))),
    "logprobs": (0, pb.GenerateRequest(output=pb.Output(logprobs=0))),
    "prompt_logprobs": (2, pb.GenerateRequest(output=pb.Output(prompt_logprobs=2))),
    "token_ids": (True, pb.GenerateRequest(output=pb.Output(token_ids=True))),
    "skip_special_tokens": (False, pb.GenerateRequest(output=pb.Output(skip_special_tokens=False))),
    "echo": (True, pb.GenerateRequest(output=pb.Output(echo=True))),
    "salt": ("s", pb.GenerateRequest(cache=pb.Cache(salt="s"))),
    "no_store": (True, pb.GenerateRequest(cache=pb.Cache(no_store=True))),
    "bypass": (True, pb.GenerateRequest(cache=pb.Cache(bypass=True))),
    "json_schema": ("{}", pb.GenerateRequest(constraint=pb.Constraint(json_schema="{}"))),
    "regex": ("a+", pb.GenerateRequest(constraint=pb.Constraint(regex="a+"))),
    "grammar": ("x", pb.GenerateRequest(constraint=pb.Constraint(grammar="x"))),
    "choices": (["a"], pb.GenerateRequest(constraint=pb.Constraint(choices=pb.Choices(values=["a"])))),
    "json_object": (True, pb.GenerateRequest(constraint=pb.Constraint(json_object=True))),
    "structural_tag": ({}, pb.GenerateRequest(constraint=pb.Constraint(structural_tag="{}"))),
}


@pytest.mark.parametrize("name", sorted(GenerateOptions.__annotations__.keys() - CallOptions.__annotations__.keys()))
def test_option_reaches_the_field_of_its_name(name: str) -> None:
    value, expected = OPTIONS[name]
    expected.text = "Hi"
    assert generate_request("Hi", {name: value}) == expected


def test_every_field_of_a_request_has_an_option() -> None:
    parts = {"sampling", "stopping", "output", "cache", "constraint"}
    others = {"text", "token_ids", "chat", "resume"}
    names = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} - parts - others
    for part in (pb.Sampling, pb.Stopping, pb.Output, pb.Cache, pb.Constraint):
        names |= {field.name for field in part.DESCRIPTOR.fields}
    assert names <= GenerateOptions.__annotations__.keys()
    chat = {field.name.removesuffix("_json") for field in pb.Chat.DESCRIPTOR.fields} - {"messages"}
    assert chat <= ChatOptions.__annotations__.keys()


def test_option_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_token"):
        generate_request("Hi", {"max_token": 5})  # type: ignore[typeddict-unknown-key]


def test_prompt_of_token_ids_is_sent_as_such() -> None:
    assert generate_request([1, 2], {}).token_ids == pb.TokenIds(ids=[1, 2])


def test_prompt_without_content_is_sent_as_what_it_is() -> None:
    """Its server can then say which field is empty."""
    prompts = [generate_request("", {}), generate_request([], {}), chat_request([], {})]
    assert [request.WhichOneof("prompt") for request in prompts] == ["text", "token_ids", "chat"]


def test_schema_as_a_mapping_becomes_json() -> None:
    assert json.loads(generate_request("Hi", {"json_schema": SCHEMA}).constraint.json_schema) == SCHEMA


def test_chat_carries_tools_and_parts_as_json() -> None:
    calls = [{"function": {"name": "turn", "arguments": {"times": 2}}}]
    parts = [{"type": "text", "text": "Hi"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "name": "turn", "content": ""},
    ]
    chat = chat_request(messages, {"tools": TOOLS, "template_kwargs": {"thinking": False}, "temperature": 0}).chat
    user, assistant, tool = chat.messages
    assert json.loads(chat.tools_json) == TOOLS
    assert json.loads(chat.template_kwargs_json) == {"thinking": False}
    assert not user.HasField("content")
    assert json.loads(user.content_parts_json) == parts
    assert json.loads(assistant.tool_calls_json) == calls
    assert (assistant.reasoning_content, assistant.HasField("content")) == ("hm", False)
    assert (tool.name, tool.tool_call_id, tool.HasField("content")) == ("turn", "1", True)


def test_chat_options_reach_chat() -> None:
    chat = chat_request([USER], {"add_generation_prompt": False, "continue_final_message": True}).chat
    assert chat.HasField("add_generation_prompt")
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, True)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"stop": ["fine", "\udbc0"]}, "stopping.stop"),
        ({"json_schema": {"title": "\udbc0"}}, "constraint.json_schema"),
        ({"max_tokens": -1}, "stopping.max_tokens"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ({"model": 5}, "model"),
        ({"json_schema": {"a": {1, 2}}}, "constraint.json_schema"),
    ],
)
def test_value_that_its_field_cannot_hold_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(KvernError) as refused:
        generate_request("Hi", options)
    assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert refused.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize("prompt", ["a \udbc0", [2**32], [-1]], ids=["surrogate", "2^32", "-1"])
def test_prompt_that_no_request_holds_is_refused_before_it_is_sent(prompt: str | list[int]) -> None:
    """B11."""
    with Client("127.0.0.1:1") as client, pytest.raises(KvernError) as refused:
        client.generate(prompt)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.field == ("text" if isinstance(prompt, str) else "token_ids.ids")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": "\udbc0"}, "chat.messages[1].content"),
        ({"role": "user", "content": 123}, "chat.messages[1].content"),
        ({"role": "user", "contents": "Hi"}, "chat.messages[1].contents"),
    ],
)
def test_message_that_no_request_holds_is_refused_before_it_is_sent(message: dict[str, object], field: str) -> None:
    """B11."""
    with Client("127.0.0.1:1") as client, pytest.raises(KvernError) as refused:
        client.chat([USER, message])
    assert refused.value.field == field


def test_request_beyond_what_servers_accept_is_refused_before_it_is_sent() -> None:
    """E09."""
    with Client("127.0.0.1:1") as client, pytest.raises(KvernError, match=str(MAX_REQUEST_BYTES)) as refused:
        client.generate("x" * MAX_REQUEST_BYTES)
    assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, "text")


def test_largest_request_is_what_servers_accept() -> None:
    assert MAX_REQUEST_BYTES == MAX_RECEIVE_BYTES
