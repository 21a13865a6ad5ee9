"""What the index has to be told next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Self

from kvern.engine.block_pool import CacheEvent

MEMBER_BYTES = 8
"""The index keeps half of a digest: a chance of 2^-33 that any two of 65,536 blocks of a replica are taken for one."""


def index_member(digest: bytes) -> bytes:
    return digest[:MEMBER_BYTES]


class Delta(NamedTuple):
    """Members that became resident, and members that stopped to be."""

    adds: list[bytes]
    dels: list[bytes]

    @property
    def num_changes(self) -> int:
        return len(self.adds) + len(self.dels)


class PendingDelta:
    """Changes since the last delta, netted: a block that came and went is not told.

    They stay in the order in which they happened, parents added before and removed after their children, so that any
    beginning of them leaves a prefix-closed set. Never more than what is resident and what was.
    """

    def __init__(self) -> None:
        self._is_added: dict[bytes, bool] = {}

    def __len__(self) -> int:
        return len(self._is_added)

    def record(self, events: Iterable[CacheEvent]) -> None:
        for digest, is_added, _ in events:
            member = index_member(digest)
            # A digest's events alternate: whatever is pending is the opposite.
            if self._is_added.pop(member, None) is None:
                self._is_added[member] = is_added

    def take(self, max_changes: int) -> Delta:
        """Remove and return the oldest changes."""
        delta = Delta([], [])
        for member in list(islice(self._is_added, max_changes)):
            (delta.adds if self._is_added.pop(member) else delta.dels).append(member)
        return delta


class Position(NamedTuple):
    """What the index holds, in short: the audit on each heartbeat compares this."""

    seq: int
    """Changes told since the start."""
    num_members: int
    xor: int
    """Of all members as numbers."""

    @classmethod
    def of(cls, members: Sequence[bytes], seq: int) -> Self:
        return cls(seq, len(members), _xor(members))

    def after(self, delta: Delta) -> Position:
        return Position(
            self.seq + delta.num_changes,
            self.num_members + len(delta.adds) - len(delta.dels),
            self.xor ^ _xor(delta.adds) ^ _xor(delta.dels),
        )


def _xor(members: Iterable[bytes]) -> int:
    result = 0
    for member in members:
        result ^= int.from_bytes(member)
    return result
