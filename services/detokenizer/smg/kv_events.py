"""What an engine tells of its cached blocks, as SMG takes it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from smg_grpc_proto.generated import common_pb2

from kvern.v1 import engine_pb2

DIGEST_BYTES = 16

_HASH_BYTES = 8
"""SMG has room for half of a digest: a chance of 2^-33 that any two of 65,536 blocks of a replica are taken for one.
Then it believes one to be gone with the other, and sends a prompt where less of it is cached. Answers stay right."""


def to_event_batch(told: engine_pb2.WatchBlocksResponse, block_size: int) -> common_pb2.KvEventBatch:
    """Convert a batch, or a part of a snapshot, which begins with an event that clears all that was known."""
    batch = common_pb2.KvEventBatch(sequence_number=told.sequence, timestamp=time.time())
    if told.HasField("snapshot"):
        part = told.snapshot
        batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks = part.index, part.count, part.num_blocks
        if part.index == 0:
            batch.events.add().cleared.SetInParent()
    for change in told.changes:
        event = batch.events.add(event_id=0 if told.HasField("snapshot") else told.sequence)
        if change.HasField("stored"):
            _set_stored(event.stored, change.stored, block_size)
        else:
            event.removed.block_hashes.extend(_hashes(change.removed.digests))
    return batch


def _set_stored(stored: common_pb2.KvBlocksStored, told: engine_pb2.StoredBlocks, block_size: int) -> None:
    if told.parent:
        stored.parent_block_hash = _hash(told.parent)
    token_ids = list(told.token_ids)
    for index, block_hash in enumerate(_hashes(told.digests)):
        block_ids = token_ids[index * block_size : (index + 1) * block_size]
        stored.blocks.add(block_hash=block_hash, token_ids=block_ids, block_size=block_size)


def _hashes(digests: bytes) -> Iterator[int]:
    return (_hash(digests[start : start + DIGEST_BYTES]) for start in range(0, len(digests), DIGEST_BYTES))


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[:_HASH_BYTES], "little", signed=True)
