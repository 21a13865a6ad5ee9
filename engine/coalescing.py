"""Requests that begin the same and arrive together: one computes, the others wait for its blocks.

A hundred twins of one cold prompt then cost one prefill. A running request leads for the blocks of its known tokens
that it has yet to compute; a waiting request whose next missing block is led by another is skipped until that block is
resident, or its leader stops leading.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvern.engine.request import Request


class BlocksInProgress:
    """Which running request is computing which block."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, Request] = {}
        self._digests: dict[int, list[bytes]] = {}

    def lead(self, request: Request, digests: Iterable[bytes]) -> None:
        """Let a request lead for blocks that nobody else leads for."""
        led = [digest for digest in digests if digest not in self._leaders]
        self._leaders.update(dict.fromkeys(led, request))
        if led:
            self._digests[request.request_id] = led

    def leader(self, digest: bytes) -> Request | None:
        return self._leaders.get(digest)

    def done(self, digest: bytes) -> None:
        """A block is resident: nobody need wait for it."""
        self._leaders.pop(digest, None)

    def stop_leading(self, request: Request) -> None:
        """A request left the running set, or may no longer register what it computes."""
        for digest in self._digests.pop(request.request_id, ()):
            if self._leaders.get(digest) is request:
                del self._leaders[digest]

    def clear(self) -> None:
        self._leaders.clear()
        self._digests.clear()
