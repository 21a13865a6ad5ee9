"""A client that asks a router where to go, and calls the replica itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvern.client import AsyncClient, Client, Event, Finished, KvernError, Scheduled, Started
from kvern.v1.inference_pb2 import RouteResponse
from tests.up_process import UpProcess

PROMPT = "A quern is a hand mill: two stones, of which the upper one turns upon the lower one and grinds the grain."


@pytest.fixture
def replica(running_set: UpProcess) -> str:
    return f"unix:{running_set.sockets}/detokenizer-0.sock"


def cached_tokens(events: Sequence[Event]) -> int:
    [told] = [event.cached_tokens for event in events if isinstance(event, Scheduled)]
    return told


def run(direct: Client, route: RouteResponse) -> list[Event]:
    return list(direct.generate(route.prompt_token_ids, ticket=route.ticket, max_tokens=2, temperature=0))


def test_replica_continues_what_was_routed_there_and_the_tickets_salt_keeps_caches_apart(
    client: Client, replica: str
) -> None:
    with Client(replica) as direct:
        ours = client.route(PROMPT, salt="ours of the direct calls")
        assert cached_tokens(run(direct, ours)) == 0
        events = run(direct, ours)
        assert cached_tokens(events) == 16
        assert isinstance(events[0], Started)
        assert events[0].prompt_tokens == len(ours.prompt_token_ids)
        theirs = client.route(PROMPT, salt="theirs of the direct calls")
        assert cached_tokens(run(direct, theirs)) == 0
    through_router = client.generate(PROMPT, salt="ours of the direct calls", max_tokens=2, temperature=0)
    assert cached_tokens(list(through_router)) == 16


async def test_asyncio_client_brings_its_ticket(client: Client, replica: str) -> None:
    route = client.route(PROMPT)
    async with AsyncClient(replica) as direct:
        prompt = route.prompt_token_ids
        events = [event async for event in direct.generate(prompt, ticket=route.ticket, max_tokens=2)]
        assert isinstance(events[-1], Finished)
        with pytest.raises(KvernError, match="signed by no key") as refused:
            await anext(direct.generate(prompt, ticket=route.ticket[:-1], max_tokens=2))
    assert refused.value.reason == "TICKET_INVALID"
