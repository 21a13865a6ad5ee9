"""What this replica tells all routers through Redis: that it is there, how busy, and which blocks it holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvern.engine.core import Output, TakeSnapshot
from kvern.engine.plan import Load, StepResult
from kvern.services.engine.engine_thread import EngineThread
from kvern.services.engine.index_writer import IndexWriter
from kvern.services.engine.settings import EngineSettings
from kvern.services.runtime.redis_index import RegistryEntry, ReplicaLoad, ReplicaState, open_redis
from kvern.v1 import replica_pb2


class Announcer:
    """Fills the registry's entry and feeds the index. All methods belong to the event loop.

    Without a Redis in the settings it does nothing.
    """

    def __init__(self, settings: EngineSettings, info: replica_pb2.EngineInfo) -> None:
        """info: what is known of the engine before it is loaded."""
        self._address = settings.advertise or ""
        self._replica_id = settings.replica_id or self._address
        self._info = info
        self._state: ReplicaState = "starting"
        self._load = Load()
        self._thread: EngineThread | None = None
        self._redis = None if settings.redis is None else open_redis(settings.redis, settings.redis_password_file)
        self._writer = None if self._redis is None else IndexWriter(self._redis, self.entry, self._take_snapshot)

    @property
    def writer(self) -> IndexWriter | None:
        """What feeds the index. None without a Redis."""
        return self._writer

    def entry(self) -> RegistryEntry:
        """Return what the registry is told now."""
        info, load = self._info, self._load
        return RegistryEntry(
            replica=self._replica_id,
            address=self._address,
            epoch=info.epoch,
            model=info.model,
            contract=info.contract,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            state=self._state,
            load=ReplicaLoad(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_used_blocks=load.num_used_blocks,
                queued_prefill_tokens=load.queued_prefill_tokens,
            ),
            step_age_s=self._thread.step_age_s if self._thread is not None else 0.0,
            expected_step_s=self._thread.expected_step_s if self._thread is not None else 0.0,
        )

    def start_serving(self, thread: EngineThread, info: replica_pb2.EngineInfo) -> None:
        """Tell that the engine is loaded."""
        self._thread, self._info = thread, info
        self._turn("ready")

    def start_draining(self) -> None:
        """Tell that no request should come any more."""
        self._turn("draining")

    def on_output(self, output: Output) -> None:
        """Take in what the engine thread brought."""
        if isinstance(output, StepResult):
            self._load = output.load
            if self._writer is not None:
                self._writer.record(output.cache_events)

    async def run(self) -> None:
        """Keep Redis true to fact for ever. Raises StaleEpoch where a later start of this replica is at it."""
        if self._writer is None:
            await asyncio.Event().wait()
        else:
            await self._writer.run()

    async def close(self) -> None:
        if self._writer is not None:
            await self._writer.close()
        if self._redis is not None:
            await self._redis.aclose()

    def _turn(self, state: ReplicaState) -> None:
        self._state = state
        if self._writer is not None:
            self._writer.announce()

    async def _take_snapshot(self) -> list[bytes]:
        if self._thread is None:
            return []
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[list[bytes]] = loop.create_future()

        def take(digests: list[bytes]) -> None:
            if not taken.done():
                taken.set_result(digests)

        self._thread.send(TakeSnapshot(lambda digests: loop.call_soon_threadsafe(take, digests)))
        return await taken


@asynccontextmanager
async def announcing(announcer: Announcer) -> AsyncIterator[asyncio.Task[None]]:
    """Yield the task that announces. Leaving the block takes back what was announced."""
    task = asyncio.create_task(announcer.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        await announcer.close()
