"""Prompts that come to SMG's door as text."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from kvern.services.detokenizer.front_door import FrontDoor
from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.detokenizer.smg import servicer
from kvern.services.detokenizer.smg.servicer import SmgServicer
from kvern.services.runtime.errors import ResourceExhausted
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer


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


async def test_text_whose_call_has_gone_has_its_place_until_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has more texts encoded at a time by aborting."""
    monkeypatch.setattr(servicer, "MAX_TEXTS", 1)
    source = find_model("smollm2")
    tokenizer = HeldTokenizer(load_tokenizer(source))
    settings = DetokenizerSettings.load(["--listen=unix:/tmp/d", "--engine=unix:/tmp/e"], prog="d", environ={})
    door = SmgServicer(cast(FrontDoor, None), source, cast(Tokenizer, tokenizer), settings)
    gone = asyncio.create_task(door._encode("Once"))
    await tokenizer.begun.wait()
    gone.cancel()
    await asyncio.wait([gone])
    with pytest.raises(ResourceExhausted):
        await door._encode("upon")
    tokenizer.may_end.set()
    async with asyncio.timeout(20), door._encoding:
        pass
    assert len(await door._encode("a time")) > 0
