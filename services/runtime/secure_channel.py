"""A channel whose credentials may change: gRPC gives each of its channels the same ones for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

Open = Callable[[grpc.ChannelCredentials], grpc.aio.Channel]


class SecureChannel(grpc.aio.Channel):
    """Makes each call over a channel with the credentials of the moment.

    When they have changed, new calls go over a new channel, and the one before lives until its calls have ended.
    """

    def __init__(self, credentials: Callable[[], grpc.ChannelCredentials], open_with: Open) -> None:
        """credentials: returns the same object as long as they have not changed."""
        self._credentials = credentials
        self._open_with = open_with
        self._latest = _Channel(credentials(), open_with)
        self._retired: set[_Channel] = set()

    def latest(self) -> _Channel:
        """Return the channel for a call that begins now."""
        credentials = self._credentials()
        if credentials is not self._latest.credentials:
            before, self._latest = self._latest, _Channel(credentials, self._open_with)
            self._retired.add(before)
            before.close_when_idle(self._retired.discard)
        return self._latest

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, lambda channel: channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, lambda channel: channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, lambda channel: channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, lambda channel: channel.stream_stream(*args, **kwargs))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.latest().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.latest().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.latest().channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        for channel in (*self._retired, self._latest):
            await channel.channel.close(grace)

    async def __aenter__(self) -> SecureChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Channel:
    """A channel of gRPC's own, and its calls."""

    def __init__(self, credentials: grpc.ChannelCredentials, open_with: Open) -> None:
        self.credentials = credentials
        self.channel = open_with(credentials)
        self._num_calls = 0
        self._on_close: Callable[[_Channel], object] | None = None
        self._closing: asyncio.Task[None] | None = None

    def count(self, call: Any) -> None:
        """Take in a call that was made."""
        self._num_calls += 1
        call.add_done_callback(self._end)

    def close_when_idle(self, on_close: Callable[[_Channel], object]) -> None:
        """Close once all calls have ended; no further one is made."""
        self._on_close = on_close
        self._close_if_idle()

    def _end(self, call: object) -> None:
        self._num_calls -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._on_close is not None and not self._num_calls:
            self._closing = asyncio.create_task(self.channel.close())
            self._on_close(self)


class _Method:
    """A method as stubs hold it."""

    def __init__(self, owner: SecureChannel, make: Callable[[grpc.aio.Channel], Any]) -> None:
        self._owner = owner
        self._make = make
        self._channel: _Channel | None = None
        self._method: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        channel = self._owner.latest()
        if channel is not self._channel:
            self._channel, self._method = channel, self._make(channel.channel)
        call = self._method(*args, **kwargs)
        channel.count(call)
        return call
