"""What rank 0 tells the others: once how to start, then once a step its plan, of which they make the same one.

A rank needs of a request what its persistent batch and its sampler need: all of it when the request begins to run, then
its new block ids. Tokens are not told: every rank has all logits and draws the same ones, by itself, on its device. So
nothing waits for a token to travel, with a step in flight too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvern.engine.config import EngineConfig
from kvern.engine.plan import Plan, PlanEntry
from kvern.engine.request import Request
from kvern.engine.tensor_parallel.shard import Shard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Start:
    """The first message. A rank answers when its shard is loaded, and is told when all are."""

    config: EngineConfig
    shard: Shard
    rendezvous: Path


class EntryMessage(NamedTuple):
    """One entry of a plan."""

    request_id: int
    start: int
    num_tokens: int
    samples: bool
    first_changed_block: int
    block_ids: list[int]
    """From the first changed one on."""


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """One plan."""

    new_requests: list[Request]
    """Those that the ranks do not know, or were told to forget."""
    entries: list[EntryMessage]
    removed_ids: list[int]
    block_copies: list[tuple[int, int]]


class RankGrammar:
    """Stands for a grammar on a rank other than 0, which gets its masks from there. Implements `GrammarState`."""

    error = ""

    def advance(self, token_id: int) -> bool:
        raise NotImplementedError("a rank other than 0 follows no grammar")

    def fill(self, row: NDArray[np.int32], *, may_end: bool) -> None:
        """Leave the row to what rank 0 sends."""


class PlanWriter:
    """Rank 0's: knows which requests the others know."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def write(self, plan: Plan) -> PlanMessage:
        """Return what to tell of a plan. To be called before the runner takes in what changed."""
        self._known.difference_update(plan.removed_ids)
        requests = {entry.request.request_id: entry.request for entry in plan.entries}
        new = [request for request_id, request in requests.items() if request_id not in self._known]
        entries = [_write_entry(entry, entry.request.request_id in self._known) for entry in plan.entries]
        self._known.update(requests)
        return PlanMessage([_bare(request) for request in new], entries, plan.removed_ids, plan.block_copies)


class PlanReader:
    """Another rank's: keeps its own copies of the running requests."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def read(self, message: PlanMessage) -> Plan:
        for request_id in message.removed_ids:
            self._requests.pop(request_id, None)
        self._requests |= {request.request_id: request for request in message.new_requests}
        entries = [self._read_entry(entry) for entry in message.entries]
        return Plan(entries, message.removed_ids, message.block_copies)

    def _read_entry(self, entry: EntryMessage) -> PlanEntry:
        request = self._requests[entry.request_id]
        request.block_ids[entry.first_changed_block :] = entry.block_ids
        request.first_changed_block = entry.first_changed_block
        return PlanEntry(request, entry.start, entry.num_tokens, entry.samples)


def _write_entry(entry: PlanEntry, is_known: bool) -> EntryMessage:
    request = entry.request
    first = request.first_changed_block if is_known else 0
    block_ids = request.block_ids[first:]
    return EntryMessage(request.request_id, entry.start, entry.num_tokens, entry.samples, first, block_ids)


def _bare(request: Request) -> Request:
    """Return what a rank must know of a request beside its blocks."""
    return Request(
        request.request_id,
        request.token_ids,
        request.num_prompt_tokens,
        request.sampling,
        request.stopping,
        prompt_logprobs=request.prompt_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        num_resident_tokens=request.num_resident_tokens,
        grammar=RankGrammar() if request.grammar is not None else None,
    )
