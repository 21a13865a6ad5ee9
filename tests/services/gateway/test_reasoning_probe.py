"""What is remembered of templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvern.services.gateway.chat_request import ChatCompletionRequest
from kvern.services.gateway.reasoning_probe import ReasoningProbe
from kvern.services.gateway.router_client import RouterClient
from kvern.services.runtime.channel import open_channel

from .scripted_router import ScriptedRouter
from .setup import USER


@pytest.mark.parametrize(("max_age_s", "num_looks"), [(0.0, 3), (3600.0, 1)])
async def test_template_is_looked_at_again_after_a_while(tmp_path: Path, max_age_s: float, num_looks: int) -> None:
    """Under one name, another model may come."""
    router, address = ScriptedRouter(), f"unix:{tmp_path}/router.sock"
    body = ChatCompletionRequest.model_validate({"messages": [USER], "chat_template_kwargs": {"thinking": True}})
    async with router.serving(address), open_channel(address) as channel:
        probe = ReasoningProbe(RouterClient(channel), max_age_s)
        assert [await probe.begins_in_reasoning(body, "tiny", ()) for _ in range(3)] == [True] * 3
    assert len(router.tokenized) == num_looks
