"""Templates that loop, recurse or fill the memory, in real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry
from pydantic_core import from_json

from kvern.services.runtime import bounded_work
from kvern.services.runtime.bounded_process import Message
from kvern.services.runtime.bounded_work import BoundedWork
from kvern.services.runtime.cores import usable_cores
from kvern.services.runtime.errors import InvalidArgument, ResourceExhausted
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer
from kvern.services.tokenizer.metrics import TokenizerMetrics
from kvern.services.tokenizer.prefix_cache import PrefixCache
from kvern.services.tokenizer.prompt import PromptEncoder
from kvern.services.tokenizer.servicer import TokenizerServicer
from kvern.services.tokenizer.workers import Workers
from kvern.v1 import inference_pb2, tokenizer_pb2

NESTED_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS_POWER = "{{ (7 ** 9999999 ** 2) }}"
BOMBS = {
    "loops": NESTED_LOOPS,
    "power": ENDLESS_POWER,
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "memory": "{{ 'x' * 10**10 }}",
    "width": "{{ '%99999999999d' % 1 }}",
    "text": "{{ 'x' * (7 * 10**7) }}",
    "no text": "{{ '\\ud800' }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"

CHAT = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="Hi")])


def _tokenizer(template: str) -> Tokenizer:
    tokenizer = load_tokenizer(find_model("smollm2"))
    tokenizer.transformers.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return _tokenizer(PLAIN)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> PromptEncoder:
    return PromptEncoder(tokenizer, PrefixCache(0))


@pytest.fixture
def plain(tokenizer: Tokenizer) -> Iterator[Tokenizer]:
    yield tokenizer
    tokenizer.transformers.chat_template = PLAIN


@pytest.mark.parametrize("bomb", BOMBS)
def test_bomb_is_refused_and_the_next_chat_is_not(encoder: PromptEncoder, plain: Tokenizer, bomb: str) -> None:
    request = tokenizer_pb2.EncodePromptRequest(chat=CHAT)
    plain.transformers.chat_template = BOMBS[bomb]
    with pytest.raises(InvalidArgument) as refused:
        encoder.encode(request)
    assert refused.value.field == "chat"
    assert len(refused.value.message) < 400
    plain.transformers.chat_template = PLAIN
    assert encoder.render(request) == "Hi"


def test_process_that_others_are_forked_from_died_is_started_anew(encoder: PromptEncoder) -> None:
    module = "kvern.services.tokenizer.template_process"
    forks = bounded_work._forks_of(module)
    assert forks.process is not None
    os.kill(forks.process.pid, signal.SIGKILL)
    forks.process.wait()
    job: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": PLAIN, "variables": {}}
    assert BoundedWork(module).ask(job) == {"rendered": "Hi"}


def test_values_as_deep_as_requests_may_be_come_to_the_template(encoder: PromptEncoder, plain: Tokenizer) -> None:
    """One more is refused where requests come in."""
    deep = "[" * 200 + "]" * 200
    with pytest.raises(ValueError, match="recursion limit"):
        from_json(f"[[{deep}]]")
    plain.transformers.chat_template = "{{ deep | tojson }}"
    chat = inference_pb2.Chat(messages=CHAT.messages, template_kwargs_json=f'{{"deep": {deep}}}')
    assert encoder.render(tokenizer_pb2.EncodePromptRequest(chat=chat)) == deep


def test_template_sees_the_machine_as_little_as_its_python(encoder: PromptEncoder, plain: Tokenizer) -> None:
    probes = ("''.__class__.__mro__", "cycler.__init__.__globals__", "self._TemplateReference__context")
    for probe in probes:
        plain.transformers.chat_template = f"{{{{ {probe} }}}}"
        try:
            rendered = encoder.render(tokenizer_pb2.EncodePromptRequest(chat=CHAT))
        except InvalidArgument:
            continue
        assert "class" not in rendered
        assert "os" not in rendered


@contextmanager
def lasting(template: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let nobody have an answer for a template while the block runs: it takes all of its limits, however long."""
    may_end, ask = threading.Event(), BoundedWork.ask

    def hold(work: BoundedWork, job: Message) -> Message | None:
        if job["chat_template"] != template:
            return ask(work, job)
        may_end.wait()
        return None

    monkeypatch.setattr(BoundedWork, "ask", hold)
    try:
        yield
    finally:
        may_end.set()


async def test_neighbours_are_served_while_bombs_go_off(plain: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = {"bomb": _tokenizer(NESTED_LOOPS), "good": plain}
    context = cast("grpc.aio.ServicerContext[Any, Any]", None)
    with Workers(tokenizers) as workers, lasting(NESTED_LOOPS, monkeypatch):
        metrics = TokenizerMetrics(CollectorRegistry(), tokenizers)
        servicer = TokenizerServicer(tokenizers, workers, PrefixCache(0), metrics)

        async def encode(model: str, **prompt: Any) -> int:
            request = tokenizer_pb2.EncodePromptRequest(model=model, **prompt)
            return len((await servicer.EncodePrompt(request, context)).token_ids)

        # More than there are threads for one model's chats.
        bombs = [asyncio.create_task(encode("bomb", chat=CHAT)) for _ in range(2 * usable_cores())]
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            for _ in range(20):
                assert await encode("good", chat=CHAT) == 1
                assert await encode("bomb", text="Hi") == 1
        assert not any(bomb.done() for bomb in bombs)
        for bomb in bombs:
            bomb.cancel()


async def test_text_that_a_template_makes_of_little_counts_as_what_it_is() -> None:
    """Encoding takes a hundred times as much memory."""
    tokenizers = {"long": _tokenizer("{{ 'x' * 10**5 }}")}
    with Workers(tokenizers, max_bytes=10**4) as workers:
        metrics = TokenizerMetrics(CollectorRegistry(), tokenizers)
        servicer = TokenizerServicer(tokenizers, workers, PrefixCache(0), metrics)
        request = tokenizer_pb2.EncodePromptRequest(model="long", chat=CHAT)
        with pytest.raises(ResourceExhausted):
            await servicer.EncodePrompt(request, cast("grpc.aio.ServicerContext[Any, Any]", None))
