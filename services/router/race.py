"""One stream out of one or two attempts: where the first is slow to answer, another replica is asked as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import grpc

from kvern.services.router.attempt import Attempt, ReplicaLost
from kvern.v1 import replica_pb2


class Race:
    """Reads attempts side by side until one of them brings output. That one is read to its end, the other is dropped.

    Leaving the block closes all.
    """

    def __init__(
        self,
        first: Attempt,
        hedge: Callable[[], Awaitable[Attempt | None]],
        hedge_after_s: float | None,
        on_hedge_end: Callable[[bool], None],
    ) -> None:
        """hedge: opens a second attempt if there may be one, hedge_after_s seconds from now; None: never. on_hedge_end:
        is told once whether that one is read to its end.
        """
        self.leader = first
        """The attempt that the last message is of."""
        self.lost: list[Attempt] = []
        """Those whose replicas were lost."""
        self._hedge = hedge
        self._hedge_at = None if hedge_after_s is None else time.monotonic() + hedge_after_s
        self._is_decided = hedge_after_s is None
        self._reads: dict[Attempt, asyncio.Task[replica_pb2.ServeResponse | None]] = {}
        self._attempts = [first]
        self._second: Attempt | None = None
        """The hedge, as long as it is not decided."""
        self._on_hedge_end = on_hedge_end

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_hedge(has_won=False)
        for attempt in list(self._attempts):
            await self._drop(attempt)

    async def read(self) -> replica_pb2.ServeResponse | None:
        """Return the next message, None at the end. Raises, as the last attempt that is left does, what it raises."""
        if self._is_decided:
            return await self._read_leader()
        response = await self._read_first()
        if response is None or response.updates:
            await self._decide()
        return response

    async def _read_leader(self) -> replica_pb2.ServeResponse | None:
        try:
            return await self.leader.read()
        except ReplicaLost:
            self.lost.append(self.leader)
            raise

    async def _read_first(self) -> replica_pb2.ServeResponse | None:
        while True:
            for attempt in self._attempts:
                if attempt not in self._reads:
                    self._reads[attempt] = asyncio.create_task(attempt.read())
            wait_s = None if self._hedge_at is None else max(0.0, self._hedge_at - time.monotonic())
            await asyncio.wait(self._reads.values(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            answered = next((each for each, read in self._reads.items() if read.done()), None)
            if answered is None:
                await self._ask_another()
            elif not await self._has_failed(answered):
                self.leader = answered
                return self._reads.pop(answered).result()

    async def _ask_another(self) -> None:
        self._hedge_at = None
        another = self._second = await self._hedge()
        if another is not None:
            self._attempts.append(another)

    async def _has_failed(self, attempt: Attempt) -> bool:
        """Drop an attempt that failed while another one runs. Raises what the last one fails with."""
        error = self._reads[attempt].exception()
        if error is None:
            return False
        if isinstance(error, ReplicaLost):
            self.lost.append(attempt)
        if len(self._attempts) == 1 or not isinstance(error, ReplicaLost | grpc.aio.AioRpcError):
            raise error
        await self._drop(attempt)
        return True

    async def _decide(self) -> None:
        self._is_decided = True
        self._end_hedge(has_won=self.leader is self._second)
        for attempt in list(self._attempts):
            if attempt is not self.leader:
                await self._drop(attempt)

    def _end_hedge(self, *, has_won: bool) -> None:
        if self._second is not None:
            self._second = None
            self._on_hedge_end(has_won)

    async def _drop(self, attempt: Attempt) -> None:
        self._attempts.remove(attempt)
        read = self._reads.pop(attempt, None)
        if read is not None:
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)
        await attempt.close()
