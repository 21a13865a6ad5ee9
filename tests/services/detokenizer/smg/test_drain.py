"""A replica that goes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from tests.services.detokenizer.setup import SERVING, TIMEOUT_S

from .door import open_door


async def test_draining_replica_takes_nothing_new_and_finishes_what_runs(tmp_path: Path) -> None:
    """SMG knows no resuming: its streams have the whole time, and may be aborted all along."""
    async with open_door(tmp_path) as door:
        door.engine.says_hello.set()
        await door.setup.health_becomes(SERVING)
        kept, left = [await door.begin(request_id=name) for name in ("kept", "left")]
        door.setup.process.terminate()
        async with asyncio.timeout(TIMEOUT_S):
            while await door.health() != (False, "draining"):
                pass
        assert await door.generate().error() == (grpc.StatusCode.UNAVAILABLE, "this replica drains")
        await door.abort("left")
        assert (await left.error())[0] is grpc.StatusCode.CANCELLED
        door.engine.step([kept.add.id], [9])
        assert list((await kept.chunk()).token_ids) == [9]
        door.engine.end(kept.add.id)
        [complete] = await kept.rest()
        assert complete.finish_reason == "length"
        async with asyncio.timeout(TIMEOUT_S):
            assert await door.setup.process.wait() == 0
