"""Fields of requests: what each becomes, and what is refused, by name."""

from __future__ import annotations

import json

import pytest

from kvern.services.gateway.request_body import MAX_VALUES
from kvern.v1 import inference_pb2

from .scripted_router import STARTED, finished, responds
from .setup import CHAT, COMPLETIONS, USER, Setup

pytestmark = pytest.mark.asyncio(loop_scope="package")

Constraint = inference_pb2.Constraint
SCHEMA = {"type": "integer"}


async def test_sampling_fields_reach_the_router(setup: Setup) -> None:
    setup.router.behaviour = responds(STARTED, finished(index=1), finished(index=0))
    fields = {"n": 2, "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {"5": 1}}
    fields |= {"min_p": 0.25, "repetition_penalty": 1.5, "allowed_token_ids": [3, 4], "bad_words": ["x"]}
    sampling = (await setup.asked(**fields)).sampling
    assert (sampling.n, sampling.frequency_penalty, sampling.presence_penalty) == (2, 0.5, -0.5)
    assert dict(sampling.logit_bias) == {5: 1.0}
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (list(sampling.allowed_token_ids), list(sampling.bad_words)) == ([3, 4], ["x"])


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (5, 5), (2**32 - 1, 2**32 - 1)])
async def test_top_k_of_all_tokens_is_said_in_two_ways(setup: Setup, top_k: int, expected: int) -> None:
    """D12."""
    assert (await setup.asked(top_k=top_k)).sampling.top_k == expected


async def test_stopping_fields_reach_the_router(setup: Setup) -> None:
    fields = {"min_tokens": 1, "ignore_eos": True, "stop_token_ids": [7], "include_stop_str_in_output": True}
    stopping = (await setup.asked(max_tokens=3, max_completion_tokens=3, **fields)).stopping
    assert (stopping.max_tokens, stopping.min_tokens, stopping.ignore_eos, stopping.include_stop) == (3, 1, True, True)
    assert list(stopping.stop_token_ids) == [7]


async def test_other_extensions_reach_the_router(setup: Setup) -> None:
    fields = {"cache_salt": "s", "priority": -3, "truncate_prompt_tokens": 9, "prompt_cache_key": "me"}
    request = await setup.asked(**fields, skip_special_tokens=False, add_special_tokens=True)
    assert (request.cache.salt, request.priority, request.keep_last_tokens, request.session_id) == ("s", -3, 9, "me")
    assert request.output.skip_special_tokens is False
    assert request.add_special_tokens is True


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA},
                }
            },
            Constraint(json_schema=json.dumps(SCHEMA)),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint(json_schema=json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "a+"}}, Constraint(regex="a+")),
        ({"structured_outputs": {"json_object": True}}, Constraint(json_object=True)),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, Constraint(structural_tag='{"a": 1}')),
        ({"guided_json": '{"type": "null"}'}, Constraint(json_schema='{"type": "null"}')),
        ({"guided_regex": "a"}, Constraint(regex="a")),
        ({"guided_grammar": "start: A"}, Constraint(grammar="start: A")),
        ({"guided_choice": ["a", "b"]}, Constraint(choices=inference_pb2.Choices(values=["a", "b"]))),
    ],
)
async def test_ways_to_constrain_the_output_become_one(
    setup: Setup, fields: dict[str, object], expected: Constraint | None
) -> None:
    request = await setup.asked(**fields)
    assert (request.constraint if request.HasField("constraint") else None) == expected


async def test_fields_that_official_clients_send_by_default_are_taken(setup: Setup) -> None:
    fields = {"model": "tiny", "stream": False, "modalities": ["text"], "verbosity": None, "web_search_options": None}
    assert (await setup.chat(**fields)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_fields_that_change_no_answer_are_taken(setup: Setup, path: str) -> None:
    fields: dict[str, object] = {"metadata": {"run": "a"}, "store": True, "service_tier": "flex", "user": "u"}
    fields |= {"safety_identifier": "x", "prompt_cache_retention": "24h", "no_such_field": None}
    assert (await (setup.chat if path == CHAT else setup.complete)(**fields)).status_code == 200


async def test_what_clients_of_several_servers_add_to_messages_is_taken(setup: Setup) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    answered = {"role": "assistant", "content": "Hi", "provider_specific_fields": {"refusal": None}, "images": None}
    asked = {"role": "user", "content": [{"type": "text", "text": "a", **mark}], **mark}
    tool = {"type": "function", "function": {"name": "f"}, **mark}
    chat = (await setup.asked(messages=[USER, answered, asked], tools=[tool])).chat
    assert [message.content for message in chat.messages] == ["Hello", "Hi", "a"]
    assert json.loads(chat.tools_json) == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
        ("prompt_logprobs", 1),
        ("no_such_field", 1),
    ],
)
async def test_unsupported_field_is_refused_by_name(setup: Setup, param: str, value: object) -> None:
    error = await setup.refused(**{param: value})
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "hot"}),
        ("temperature", {"temperature": True}),
        ("temperature", {"temperature": 10**400}),
        ("top_p", {"top_p": 1.1}),  # D13
        ("top_p", {"top_p": -0.1}),
        ("top_k", {"top_k": -2}),
        ("min_p", {"min_p": 2}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("seed", {"seed": 2**64}),
        ("store", {"store": 0}),
        ("n", {"n": 0}),
        ("n", {"n": 2**32 - 1}),
        ("priority", {"priority": 2**31}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 2**32}),
        ("max_tokens", {"max_tokens": 1.5}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 1, "max_tokens": 2}),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 2}),
        ("stop", {"stop": ""}),  # A14
        ("stop[1]", {"stop": ["x", ""]}),
        ("stop[1]", {"stop": ["x", 5]}),
        ("bad_words[0]", {"bad_words": [""]}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stream_options.obfuscate", {"stream": True, "stream_options": {"obfuscate": True}}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        ),
        ("guided_json", {"guided_json": {}, "structured_outputs": {"regex": "a"}}),
        ("guided_json", {"guided_json": "[]"}),
        ("guided_choice", {"guided_choice": []}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": ""}}),
        ("logit_bias.x", {"logit_bias": {"x": 1}}),
        ("logit_bias.5", {"logit_bias": {"5": 101}}),
        ("logit_bias.4294967296", {"logit_bias": {"4294967296": 1}}),
        ("top_logprobs", {"top_logprobs": 65, "logprobs": True}),
        ("top_logprobs", {"top_logprobs": 1}),
        ("request_id", {"request_id": "a b"}),
        ("cache_salt", {"cache_salt": "x" * 257}),
        ("prompt_cache_key", {"prompt_cache_key": "x" * 257}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("chat_template_kwargs", {"chat_template_kwargs": []}),
        ("add_generation_prompt", {"continue_final_message": True, "add_generation_prompt": True}),
        ("continue_final_message", {"continue_final_message": True}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "Hello"}),
        ("messages[1].role", {"messages": [USER, {"content": "Hello"}]}),
        ("messages[0].role", {"messages": [{"role": "", "content": "Hello"}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "x", "text": "y"}]}]}),
        (
            "messages[0].content[0].type",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        ),
        ("messages[0]", {"messages": ["Hello"]}),
    ],
)
async def test_bad_value_names_param(setup: Setup, param: str, fields: dict[str, object]) -> None:
    error = await setup.refused(**fields)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert error["code"] in ("invalid_value", "invalid_type", "missing_required_parameter", "unsupported_parameter")


@pytest.mark.parametrize(("content", "param"), [(123, "messages[0].content"), ([["x"]], "messages[0].content[0]")])
async def test_content_of_wrong_type_names_field(setup: Setup, content: object, param: str) -> None:
    """B19."""
    error = await setup.refused(messages=[{"role": "user", "content": content}])
    assert (error["param"], error["code"]) == (param, "invalid_type")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"messages": [{"role": "user", "content": "\\udc8d"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b"[" * 100_000,
    ],
)
async def test_malformed_json_is_refused(setup: Setup, body: bytes) -> None:
    """B12 among them."""
    response = await setup.client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "JSON" in error["message"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": [1] * MAX_VALUES}),
        ("stop", {"stop": [[]] * MAX_VALUES}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": [{"b": [0] * (MAX_VALUES // 2)}] * 2}}),
    ],
)
async def test_more_values_than_a_body_may_hold_are_refused(
    setup: Setup, param: str, fields: dict[str, object]
) -> None:
    """To report every one of millions of wrong values would take a minute and 6 GiB."""
    error = await setup.refused(**fields)
    assert error["param"] == param
    assert str(MAX_VALUES) in error["message"]


async def test_ids_are_not_bounded_by_the_values_a_body_may_hold(setup: Setup) -> None:
    ids = list(range(MAX_VALUES + 1))
    assert (await setup.complete(prompt=ids, allowed_token_ids=ids)).status_code == 200
    assert len(setup.router.received[0].sampling.allowed_token_ids) == len(ids)


async def test_five_megabytes_reach_router(setup: Setup) -> None:
    text = "word " * 1_000_000
    request = await setup.asked(messages=[{"role": "user", "content": text}])
    assert request.chat.messages[0].content == text
