"""Prompts that come to SMG's door as text."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2

from kvern.services.detokenizer.front_door import FrontDoor
from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.detokenizer.smg import servicer
from kvern.services.detokenizer.smg.servicer import SmgServicer
from kvern.services.runtime.errors import ResourceExhausted, Unavailable
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer
from tests.services.detokenizer.scripted_engine import INFO
from tests.services.detokenizer.setup import TIMEOUT_S


class HeldTokenizer:
    """Encodes when it is let go."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.begun = asyncio.Event()
        self.may_end = threading.Event()
        self._tokenizer = tokenizer
        self._loop = asyncio.get_running_loop()

    def encode(self, text: str, **options: Any) -> list[int]:
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.may_end.wait(30)
        return self._tokenizer.encode(text, **options)


def servicer_of(door: Any, tokenizer: HeldTokenizer) -> SmgServicer:
    settings = DetokenizerSettings.load(["--listen=unix:/tmp/d", "--engine=unix:/tmp/e"], prog="d", environ={})
    return SmgServicer(cast(FrontDoor, door), find_model("smollm2"), cast(Tokenizer, tokenizer), settings)


@pytest.fixture
async def tokenizer() -> HeldTokenizer:
    return HeldTokenizer(load_tokenizer(find_model("smollm2")))


async def test_text_whose_call_has_gone_has_its_place_until_it_is_encoded(
    tokenizer: HeldTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has more texts encoded at a time by aborting."""
    monkeypatch.setattr(servicer, "MAX_TEXTS", 1)
    door = servicer_of(None, tokenizer)
    gone = asyncio.create_task(door._encode("Once"))
    await tokenizer.begun.wait()
    gone.cancel()
    await asyncio.wait([gone])
    with pytest.raises(ResourceExhausted):
        await door._encode("upon")
    tokenizer.may_end.set()
    async with asyncio.timeout(TIMEOUT_S), door._encoding:
        pass
    assert len(await door._encode("a time")) > 0


async def test_text_that_is_being_encoded_when_the_drain_begins_is_refused(tokenizer: HeldTokenizer) -> None:
    """What began after the drain of the door, nothing would end."""
    door = SimpleNamespace(engine=SimpleNamespace(info=INFO), is_draining=False)
    context = SimpleNamespace(time_remaining=lambda: None)
    request = vllm_engine_pb2.GenerateRequest(request_id="r", text="Once")
    responses = servicer_of(door, tokenizer).Generate(request, cast("grpc.aio.ServicerContext[Any, Any]", context))
    first = asyncio.ensure_future(anext(responses))
    await tokenizer.begun.wait()
    door.is_draining = True
    tokenizer.may_end.set()
    with pytest.raises(Unavailable, match="this replica drains"):
        await first
