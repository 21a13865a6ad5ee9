from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvern.services.router.models import list_models, max_context, resolve_model
from kvern.services.router.replica import Replica
from kvern.services.router.replica_table import ReplicaTable
from kvern.services.runtime.errors import InvalidArgument, NotFound, Unavailable
from kvern.v1 import replica_pb2

from . import scripted

_EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
"""The HTTP/2 frame that a server begins with, and a client waits for."""


async def test_pause_of_suspected_replica_ends_at_once() -> None:
    replica = Replica("unix:/none")
    replica.suspect()
    await replica.pause(3600)
    await replica.close()


async def test_poll_that_a_call_failed_during_leaves_the_replica_out(tmp_path: Path) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    class Slow(scripted.ScriptedReplica):
        async def GetReplicaInfo(
            self, request: replica_pb2.GetReplicaInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
        ) -> replica_pb2.GetReplicaInfoResponse:
            asked.set()
            await may_answer.wait()
            return await super().GetReplicaInfo(request, context)

    replica = Replica(f"unix:{tmp_path}/s.sock")
    async with scripted.serving(Slow(replica.address)):
        polling = asyncio.create_task(replica.poll())
        await asked.wait()
        replica.suspect()
        may_answer.set()
        await polling
        assert not replica.reachable
        await replica.pause(3600)
        await replica.poll()
        assert replica.reachable
        await replica.close()


async def test_replicas_are_called_by_the_authority_that_the_table_was_given(tmp_path: Path) -> None:
    called, hung_up = asyncio.Event(), asyncio.Event()

    async def read_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_EMPTY_SETTINGS)
        # The header :authority of the first call.
        await reader.readuntil(b"mill-replicas")
        called.set()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        hung_up.set()

    server = await asyncio.start_unix_server(read_call, tmp_path / "s.sock")
    table = ReplicaTable([f"unix:{tmp_path}/s.sock"], lambda: None, authority="mill-replicas")
    async with server, asyncio.timeout(30):
        watching = asyncio.create_task(table.watch())
        await called.wait()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await table.close()
        await hung_up.wait()


def _replica(model: str, *, contract: str = "c", max_model_len: int = 128, ready: bool = True) -> Replica:
    replica = Replica("unix:/none")
    replica.engine = replica_pb2.EngineInfo(model=model, contract=contract, max_model_len=max_model_len)
    replica.state, replica.reachable = replica_pb2.REPLICA_STATE_READY, ready
    return replica


async def test_resolve_model_named_or_the_only_one() -> None:
    assert resolve_model([_replica("a"), _replica("a")], "") == "a"
    assert resolve_model([_replica("a"), _replica("b")], "b") == "b"


async def test_resolve_model_whose_replicas_are_away_is_still_known() -> None:
    assert resolve_model([_replica("a", ready=False)], "a") == "a"


async def test_resolve_model_ambiguous_or_unknown_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="model: must be named where several are served: a, b"):
        resolve_model([_replica("a"), _replica("b")], "")
    with pytest.raises(NotFound, match="'c' is not served here; served: a, b"):
        resolve_model([_replica("a"), _replica("b")], "c")


async def test_resolve_model_before_any_replica_was_seen_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        resolve_model([Replica("unix:/none")], "a")


async def test_list_models_groups_ready_replicas_by_name_and_contract() -> None:
    replicas = [
        _replica("a", max_model_len=256),
        _replica("a", max_model_len=128),
        _replica("a", contract="other"),
        _replica("b", ready=False),
    ]
    listed = [(each.name, each.contract, each.max_context, each.ready_replicas) for each in list_models(replicas)]
    assert listed == [("a", "c", 128, 2), ("a", "other", 128, 1)]


async def test_max_context_is_what_every_replica_can_run() -> None:
    replicas = [_replica("a", max_model_len=256), _replica("a", max_model_len=128), _replica("b", max_model_len=64)]
    assert max_context(replicas, "a") == 128
