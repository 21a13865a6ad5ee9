"""Replicas that come, go and are replaced, as a router hears of them from its list, from DNS and from the registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvern.services.router import discovery, replica_table
from kvern.services.router.discovery import Discovery, fixed_addresses, resolve
from kvern.services.router.replica import Replica
from kvern.services.router.replica_table import ReplicaTable
from kvern.services.runtime.redis_index import RegistryEntry
from kvern.v1 import inference_pb2, replica_pb2

from . import scripted
from .scripted import MODEL, ScriptedReplica

EPOCH = 1
"""Of the scripted replicas."""


def entry(address: str, *, replica: str = "", epoch: int = EPOCH) -> RegistryEntry:
    return RegistryEntry(
        replica=replica or address,
        address=address,
        epoch=epoch,
        model=MODEL,
        contract="c",
        block_size=16,
        num_blocks=8,
        max_model_len=128,
        state="ready",
    )


class Watched:
    """A table that is being watched."""

    def __init__(self, *addresses: str) -> None:
        self._changed = asyncio.Event()
        self.table = ReplicaTable(addresses, self._changed.set)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[ReplicaTable]:
        task = asyncio.create_task(self.table.watch())
        try:
            yield self.table
        finally:
            task.cancel()
            await asyncio.wait([task])
            await self.table.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def polled(self) -> None:
        """Wait until the only replica has been polled once more from beginning to end."""
        async with asyncio.timeout(10):
            for _ in range(2):
                self._changed.clear()
                await self._changed.wait()

    @property
    def addresses(self) -> set[str]:
        return {replica.address for replica in self.table}

    @property
    def ready(self) -> set[str]:
        return {replica.address for replica in self.table.ready(MODEL)}

    def register(self, *entries: RegistryEntry) -> None:
        self.table.set_registered({each.replica: each for each in entries})


@pytest.fixture(autouse=True)
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests wait for the next poll of a replica or of a name."""
    monkeypatch.setattr(replica_table, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(discovery, "MIN_RESOLVE_INTERVAL_S", 0.05)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/replica.sock"


async def test_replica_in_the_registry_alone_is_found_and_used(address: str) -> None:
    watched = Watched()
    async with scripted.serving(ScriptedReplica(address)), watched.watching() as table:
        watched.register(entry(address, replica="r0"))
        await watched.until(lambda: watched.ready == {address})
        [replica] = table
        assert (replica.id, replica.index_id) == ("r0", "r0")
        assert (replica.status.registered, replica.status.listed) == (True, False)


async def test_reachable_replica_stays_when_registry_and_list_lose_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_table, "FORGET_AFTER_S", 0.0)
    watched = Watched(address)
    async with scripted.serving(ScriptedReplica(address)), watched.watching() as table:
        watched.register(entry(address))
        await watched.until(lambda: watched.ready == {address})
        watched.register()
        table.set_listed([])
        await watched.polled()
        assert watched.ready == {address}


async def test_replica_that_cannot_be_reached_stays_while_something_lists_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F19: it gets no calls. It is forgotten once list and registry have lost it as well."""
    monkeypatch.setattr(replica_table, "FORGET_AFTER_S", 0.0)
    monkeypatch.setattr("kvern.services.router.replica.POLL_TIMEOUT_S", 0.2)
    watched = Watched(address)
    async with watched.watching() as table:
        async with scripted.serving(ScriptedReplica(address)):
            watched.register(entry(address))
            await watched.until(lambda: watched.ready == {address})
        await watched.until(lambda: watched.ready == set())
        table.set_listed([])
        await watched.polled()
        assert watched.addresses == {address}
        watched.register()
        await watched.until(lambda: watched.addresses == set())


async def test_replica_that_drained_is_forgotten_once_it_is_gone_and_not_brought_back(address: str) -> None:
    watched = Watched()
    async with watched.watching() as table:
        peer = ScriptedReplica(address)
        async with scripted.serving(peer):
            watched.register(entry(address))
            await watched.until(lambda: watched.ready == {address})
            peer.state = replica_pb2.REPLICA_STATE_DRAINING
            await watched.until(lambda: table[address].is_draining)
            assert (watched.ready, watched.addresses) == (set(), {address})
        await watched.until(lambda: watched.addresses == set())
        watched.register(replace(entry(address), state="draining"))
        assert watched.addresses == set()


async def test_replica_whose_engine_says_draining_in_the_registry_gets_nothing_new(address: str) -> None:
    watched = Watched(address)
    async with scripted.serving(ScriptedReplica(address)), watched.watching():
        await watched.until(lambda: watched.ready == {address})
        watched.register(replace(entry(address), state="draining"))
        assert watched.ready == set()


async def test_replica_restarted_elsewhere_under_its_name_replaces_the_first(tmp_path: Path) -> None:
    """F02. What comes late from the first is not believed."""
    first, second = f"unix:{tmp_path}/first.sock", f"unix:{tmp_path}/second.sock"
    watched = Watched()
    async with scripted.serving(ScriptedReplica(first), ScriptedReplica(second)), watched.watching():
        watched.register(entry(first, replica="r0"))
        await watched.until(lambda: watched.ready == {first})
        watched.register(entry(second, replica="r0", epoch=EPOCH + 1))
        assert watched.addresses == {second}
        watched.register(entry(first, replica="r0"))
        assert watched.addresses == {second}


async def test_replica_whose_later_engine_registered_waits_until_it_speaks_of_that_one(address: str) -> None:
    """F02: the same name and address."""
    watched = Watched(address)
    peer = ScriptedReplica(address)
    async with scripted.serving(peer), watched.watching():
        await watched.until(lambda: watched.ready == {address})
        watched.register(entry(address, epoch=EPOCH + 1))
        assert watched.ready == set()
        peer.epoch = EPOCH + 1
        await watched.until(lambda: watched.ready == {address})


@pytest.mark.parametrize(
    ("step_age_s", "expected_step_s", "stalled"),
    [(4.0, 0.01, False), (6.0, 0.01, True), (6.0, 2.0, False), (21.0, 2.0, True), (59.0, 0.0, False)],
)
async def test_replica_is_stalled_when_a_step_takes_far_longer_than_expected(
    step_age_s: float, expected_step_s: float, stalled: bool
) -> None:
    replica = Replica("unix:/none")
    replica.register(replace(entry("unix:/none"), step_age_s=step_age_s, expected_step_s=expected_step_s))
    assert replica.is_stalled is stalled
    await replica.close()


async def test_replica_is_stalled_by_its_own_word_without_a_registry(address: str) -> None:
    watched = Watched(address)
    peer = ScriptedReplica(address)
    async with scripted.serving(peer), watched.watching():
        await watched.until(lambda: watched.ready == {address})
        peer.load = replica_pb2.ReplicaLoad(stalled=True)
        await watched.until(lambda: watched.ready == set())
        peer.load = replica_pb2.ReplicaLoad()
        await watched.until(lambda: watched.ready == {address})


async def test_stalled_replica_gets_nothing_new_while_the_registry_is_there_to_say_so(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(address)
    async with scripted.serving(ScriptedReplica(address)), watched.watching():
        await watched.until(lambda: watched.ready == {address})
        watched.register(replace(entry(address), step_age_s=100.0, expected_step_s=0.1))
        assert watched.ready == set()
        monkeypatch.setattr("kvern.services.router.replica.TRUST_S", 0.0)
        assert watched.ready == {address}


async def test_stream_at_a_replica_that_is_forgotten_goes_on_to_its_end(tmp_path: Path) -> None:
    first, second = f"unix:{tmp_path}/first.sock", f"unix:{tmp_path}/second.sock"
    may_finish = asyncio.Event()

    async def behaviour(request: inference_pb2.GenerateRequest) -> AsyncIterator[replica_pb2.ServeResponse]:
        yield scripted.started(request)
        await may_finish.wait()
        yield scripted.delta("whole")

    watched = Watched()
    async with scripted.serving(ScriptedReplica(first, behaviour)), watched.watching() as table:
        watched.register(entry(first, replica="r0"))
        await watched.until(lambda: watched.ready == {first})
        async with table[first].serve(replica_pb2.ServeRequest(), 20) as call:
            frames = aiter(call)
            await anext(frames)
            watched.register(entry(second, replica="r0", epoch=EPOCH + 1))
            assert watched.addresses == {second}
            may_finish.set()
            assert b"whole" in (await anext(frames)).client_frame


async def test_list_with_a_name_follows_what_it_resolves_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed call has it resolved again at once; a name that is gone means what it last meant."""
    monkeypatch.setattr("kvern.services.router.replica.POLL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(discovery, "RESOLVE_INTERVAL_S", 60.0)
    answers: asyncio.Queue[set[str] | None] = asyncio.Queue()

    async def answer(name: str) -> set[str]:
        assert name == "replicas:50052"
        found = await answers.get()
        if found is None:
            raise OSError("no such name")
        return found

    fixed = f"unix:{tmp_path}/fixed.sock"
    watched = Watched(fixed)
    resolving = asyncio.create_task(Discovery([fixed, "dns:///replicas:50052"], watched.table, answer).watch())
    try:
        async with watched.watching() as table:
            listed = lambda: {each.address for each in table if each.is_listed}  # noqa: E731
            answers.put_nowait({"127.0.0.1:1"})
            await watched.until(lambda: listed() == {fixed, "127.0.0.1:1"})
            answers.put_nowait(None)
            table.suspect(table[fixed])
            answers.put_nowait({"127.0.0.1:2"})
            await watched.until(lambda: answers.qsize() == 1)
            assert listed() == {fixed, "127.0.0.1:1"}
            table.suspect(table[fixed])
            await watched.until(lambda: listed() == {fixed, "127.0.0.1:2"})
    finally:
        resolving.cancel()


async def test_resolve_gives_addresses_with_the_port() -> None:
    assert "127.0.0.1:50052" in await resolve("localhost:50052")
    assert await resolve("[::1]:50052") == {"[::1]:50052"}


def test_fixed_addresses_are_all_but_names() -> None:
    assert fixed_addresses(["unix:/a", "dns:///b:1", "c:2"]) == ["unix:/a", "c:2"]
