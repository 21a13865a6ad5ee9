"""One generation request as the scheduler, the block pool and the runner see it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class RequestStatus(Enum):
    """Where a request stands. `_NEXT` lists the moves allowed."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_NEXT = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set(),
}


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Ranges are checked where requests come in."""

    temperature: float = 1.0
    """Below 1e-5: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    seed: int = 0
    """64 bits. Draws depend on it, the choice and the output position alone."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When a choice ends."""

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """The client's own; the model's end tokens come on top unless `ignore_eos`."""
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class CacheParams:
    """How a request uses the prefix cache."""

    salt: str = ""
    no_store: bool = False
    """Leave no blocks behind for others."""
    bypass: bool = False
    """Compute everything, reuse nothing. Implies no_store."""


@dataclass(slots=True, eq=False)
class Request:
    """State of one choice of one request. Hot and mutable; only the engine thread touches it."""

    request_id: int
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt_tokens: int
    sampling: SamplingParams
    stopping: StoppingParams
    cache: CacheParams = field(default_factory=CacheParams)
    priority: int = 0
    """Lower runs earlier."""
    arrival: int = 0
    """Position in the order of arrival."""
    choice: int = 0

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens [0, num_computed_tokens) are done with: their KV is in the table's blocks."""
    num_resident_tokens: int = 0
    """Tokens whose KV was in the cache at admission. Their slots are shared and never written again. It exceeds
    num_computed_tokens by one where a whole prompt was resident: its last token runs, to be sampled from, unwritten."""
    num_cached_tokens: int | None = None
    """Prompt tokens reused at the first admission. None until then. Recompute after preemption is no hit."""
    num_preemptions: int = 0

    block_ids: list[int] = field(default_factory=list)
    """Block table: entry i holds tokens [i * block_size, (i + 1) * block_size)."""
    block_digests: list[bytes] = field(default_factory=list)
    """Digests of the leading full blocks of token_ids, as far as computed. Never shrinks: tokens do not change."""
    num_chained_blocks: int = 0
    """Leading table entries that are the resident blocks of their digests. The next one may be registered (the chain
    rule) only when this equals its index."""
    first_changed_block: int = 0
    """Table entries from here on are news to the runner, which sets this to len(block_ids) once it has copied them."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def order(self) -> tuple[int, int, int]:
        """Who runs first, and, from the end, who is preempted first."""
        return (self.priority, self.arrival, self.choice)

    def move_to(self, status: RequestStatus) -> None:
        """Change status. Raises RuntimeError for a move that `_NEXT` does not allow: a bug in the scheduler."""
        if status not in _NEXT[self.status]:
            raise RuntimeError(f"request {self.request_id}: {self.status.value} -> {status.value} is no legal move")
        self.status = status
