"""A TCP proxy in front of a server: as a service's address it can move, and it can be slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        """Where new connections go; those that are open stay where they are."""
        self.delay_s = 0.0
        """How long each piece of a reply is held back."""
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        self._writers += [writer, server_writer]
        for source, sink, is_reply in ((reader, server_writer, False), (server_reader, writer, True)):
            task = asyncio.create_task(self._pump(source, sink, is_reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_reply: bool) -> None:
        with suppress(OSError):
            while piece := await source.read(1 << 16):
                await asyncio.sleep(self.delay_s if is_reply else 0)
                sink.write(piece)
        sink.close()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def proxied(target_port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(target_port)
    server = await asyncio.start_server(proxy._connect, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.stop()
