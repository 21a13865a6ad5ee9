"""The clients in front of a real set."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from kvern.client import AsyncClient, Client, Delta, KvernError
from tests.up_process import MAX_MODEL_LEN, UpProcess

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def _answer(client: AsyncClient) -> str:
    events = client.chat(QUESTION, max_tokens=8, temperature=0)
    return "".join([event.text async for event in events if isinstance(event, Delta)])


async def test_async_client_streams_answers_side_by_side(running_set: UpProcess) -> None:
    async with AsyncClient(running_set.listen) as client:
        answers = await asyncio.gather(*(_answer(client) for _ in range(4)))
        assert (await client.list_models()).models[0].name == "smollm2"
        assert len((await client.tokenize("The mill turns.")).ids) == 4
        routed = await client.route("The mill turns.", max_tokens=1)
        assert (routed.prompt_tokens, len(routed.candidates)) == (4, 1)
        assert len((await client.list_replicas()).replicas) == 1
    assert all("Paris" in answer for answer in answers)


def test_two_million_token_ids_are_refused_with_field_and_limit(client: Client) -> None:
    """E09."""
    with pytest.raises(KvernError, match=str(MAX_MODEL_LEN)) as refused:
        list(client.generate([1000] * 2_000_000))
    assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
