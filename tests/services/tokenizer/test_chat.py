"""Templates of several styles, beside what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from kvern.services.runtime.errors import InvalidArgument
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer
from kvern.services.tokenizer import prefix_cache
from kvern.services.tokenizer.prefix_cache import PrefixCache
from kvern.services.tokenizer.prompt import PromptEncoder
from kvern.v1 import inference_pb2, tokenizer_pb2
from tests.services import small_tokenizers

CHATML = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if thinking is defined and not thinking %}<think></think>{% endif %}{% endif %}"""

LLAMA3 = """\
{{ bos_token }}{% if date_string is defined %}Today: {{ date_string }}{% endif %}
{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('user and assistant must take turns, got ' + message.role) }}
{% endif %}
{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]
{%- else %} {{ message.content }}{{ eos_token }}{% endif %}
{% endfor %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


@dataclass(frozen=True)
class Style:
    template: str
    make: Callable[[], Backend] | None
    """None for the packaged model's tokenizer."""
    special: tuple[str, ...] = ()


STYLES = {
    "chatml": Style(CHATML, None),
    "llama3": Style(LLAMA3, small_tokenizers.byte_level, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": Style(MISTRAL, small_tokenizers.sentencepiece, ("[INST]", "[/INST]")),
    "gemma": Style(GEMMA, small_tokenizers.metaspace, ("<start_of_turn>", "<end_of_turn>")),
}


@dataclass(frozen=True)
class Model:
    tokenizer: Tokenizer
    encoder: PromptEncoder

    def encode(self, chat: inference_pb2.Chat, **fields: Any) -> list[int]:
        return list(self.encoder.encode(tokenizer_pb2.EncodePromptRequest(chat=chat, **fields)).token_ids)

    def encode_text(self, text: str) -> list[int]:
        return list(self.encoder.encode(tokenizer_pb2.EncodePromptRequest(text=text)).token_ids)

    def reference(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        options = {"add_generation_prompt": True, "return_dict": False, **options}
        ids: list[int] = self.tokenizer.transformers.apply_chat_template(messages, **options)
        return ids


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    made = {}
    for name, style in STYLES.items():
        source = find_model("smollm2")
        if style.make is not None:
            backend = style.make()
            backend.add_special_tokens(list(style.special))
            source = small_tokenizers.save(backend, tmp_path_factory.mktemp(name))
        tokenizer = load_tokenizer(source)
        tokenizer.transformers.chat_template = style.template
        made[name] = Model(tokenizer, PromptEncoder(tokenizer, PrefixCache(1 << 20)))
    return made


@pytest.fixture(scope="module", params=STYLES)
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


def messages_of(contents: list[str]) -> list[dict[str, Any]]:
    roles = ["user", "assistant"]
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def chat_of(messages: list[dict[str, Any]], **fields: Any) -> inference_pb2.Chat:
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message) for message in messages], **fields)


# Marks of control tokens are taken out of what clients send; they are no characters.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1"), max_size=20)
CONTENTS = st.lists(st.one_of(TEXTS, st.sampled_from(["", " a ", "\n\nb", "ab 日"])), min_size=1)


@settings(max_examples=40, deadline=None)
@given(CONTENTS)
def test_chat_is_encoded_as_transformers_does_while_it_grows(model: Model, contents: list[str]) -> None:
    """B02."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "MIN_PART_CHARS", 1)
        for length in range(1, len(contents) + 1):
            messages = messages_of(contents[:length])
            assert model.encode(chat_of(messages)) == model.reference(messages)


@pytest.mark.parametrize("content", ["One, two", "One, two \n", " One", "日"])
def test_final_message_is_continued_as_transformers_does(model: Model, content: str) -> None:
    messages = messages_of(["Count", content])
    expected = model.reference(messages, add_generation_prompt=False, continue_final_message=True)
    assert model.encode(chat_of(messages, continue_final_message=True)) == expected


def test_final_message_cannot_be_continued_and_answered(model: Model) -> None:
    chat = chat_of(messages_of(["a", "b"]), continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(InvalidArgument, match=r"chat: .*not compatible"):
        model.encode(chat)


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma"])
def test_bos_of_template_and_tokenizer_are_one(models: dict[str, Model], name: str) -> None:
    """B01: whether the chat is sent, with the tokenizer's special tokens or without, or its text rendered elsewhere."""
    model = models[name]
    messages = messages_of(["ab"])
    rendered = model.tokenizer.transformers.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = model.reference(messages)
    bos_id = model.tokenizer.transformers.bos_token_id
    assert expected.count(bos_id) == 1
    assert model.encode(chat_of(messages)) == expected
    with_special_tokens = model.encode(chat_of(messages), add_special_tokens=True)
    assert with_special_tokens[: len(expected)] == expected
    assert model.encode_text(rendered) == with_special_tokens


def test_refusal_comes_in_the_templates_words(models: dict[str, Model]) -> None:
    """B03, B04."""
    refused = "chat: the model's template refuses it: "
    with pytest.raises(InvalidArgument, match=f"^{refused}no system role here$"):
        models["gemma"].encode(chat_of([{"role": "system", "content": "x"}]))
    for roles, wrong in ((["system", "user"], "system"), (["user", "user"], "user")):
        chat = chat_of([{"role": role, "content": "x"} for role in roles])
        with pytest.raises(InvalidArgument, match=f"^{refused}user and assistant must take turns, got {wrong}$"):
            models["mistral"].encode(chat)
    assert models["mistral"].encode(chat_of(messages_of(["x"])))


def test_refusal_that_quotes_the_chat_is_short_and_as_typed(models: dict[str, Model]) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        models["mistral"].encode(chat_of([{"role": "</s>" + 10_000 * "x", "content": "x"}]))
    assert "got </s>xxx" in refusal.value.message
    assert len(refusal.value.message) < 400


def test_tools_calls_and_reasoning_are_rendered_as_transformers_does(models: dict[str, Model]) -> None:
    """B18."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"z": 1, "a": [1.0, 2e30, "é", None]}}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "reasoning_content": "Ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": '{"sun": true}'},
    ]
    expected = models["chatml"].reference(messages, tools=tools)
    sent = [dict(message) for message in messages]
    sent[1]["tool_calls_json"] = json.dumps([sent[1].pop("tool_calls")[0]])
    assert models["chatml"].encode(chat_of(sent, tools_json=json.dumps(tools))) == expected


@pytest.mark.parametrize(
    ("name", "variables"), [("chatml", {"thinking": False}), ("chatml", {}), ("llama3", {"date_string": "2 May"})]
)
def test_variables_reach_the_template_as_in_transformers(
    models: dict[str, Model], name: str, variables: dict[str, Any]
) -> None:
    messages = messages_of(["ab"])
    chat = chat_of(messages, template_kwargs_json=json.dumps(variables))
    assert models[name].encode(chat) == models[name].reference(messages, **variables)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_typed_control_tokens_stay_text_in_every_style(model: Model, data: st.DataObject) -> None:
    """B06."""
    # Small vocabularies lack most characters.
    special = model.tokenizer.special_ids - {model.tokenizer.backend.token_to_id("<unk>")}
    tokens = [model.tokenizer.backend.id_to_token(id) for id in sorted(special)]
    typed = "".join(data.draw(st.lists(st.sampled_from([*tokens, " ", "a", "<", "日", "\n"]), max_size=6)))
    plain = model.encode(chat_of(messages_of(["a", "a", "a"])))
    ids = model.encode(chat_of(messages_of(["a", typed, typed + "a"])))
    assert [id for id in ids if id in special] == [id for id in plain if id in special]
