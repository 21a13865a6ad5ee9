"""One generation request as the scheduler, the block pool and the runner see it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RequestStatus(Enum):
    """Where a request stands. `_NEXT` lists the moves allowed."""

    WAITING = "waiting"
    """May hold blocks, where it was parked and has resumed."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waits again, without blocks."""
    PARKED = "parked"
    """Its reader is slow: it keeps its blocks while nobody needs them, and runs no step."""
    FINISHED = "finished"


_NEXT = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.PARKED, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.PARKED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.PARKED, RequestStatus.FINISHED},
    RequestStatus.PARKED: {RequestStatus.WAITING, RequestStatus.FINISHED},
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
    """64 bits. Draws depend on it and the output position alone."""
    min_p: float = 0.0
    """Tokens less likely than this share of the most likely one's probability, after temperature, are not drawn."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Taken off a token's logit where it was generated before: once, and for each time."""
    repetition_penalty: float = 1.0
    """Divides the logit, or multiplies it where below 0, of a token that the prompt or the output has."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to addend."""
    allowed_token_ids: Sequence[int] = ()
    """Where not empty, only these are sampled."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences, none empty, that are never completed, begun in the prompt or not."""
    logprobs: int | None = None
    """How many alternatives to tell at each token beside its own log-probability. None: say nothing."""

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
    min_tokens: int = 0
    """Nothing that would end the choice is sampled before it has this many, unless nothing else may be sampled."""


@dataclass(frozen=True, slots=True)
class CacheParams:
    """How a request uses the prefix cache."""

    salt: str = ""
    no_store: bool = False
    """Leave no blocks behind for others."""
    bypass: bool = False
    """Compute everything, reuse nothing. Implies no_store."""


class GrammarState(Protocol):
    """Where one output stands in the grammar it must match. Only the engine thread touches it."""

    @property
    def error(self) -> str:
        """Why `advance` failed."""
        ...

    def advance(self, token_id: int) -> bool:
        """Take in the output's next token. False: the grammar can go no further, and the output cannot be trusted."""
        ...

    def fill(self, row: NDArray[np.int32], *, may_end: bool) -> None:
        """Write which tokens may come next: bit i % 32 of word i // 32 is set where token i may.

        row: [ceil(vocab_size / 32)]. End tokens may come exactly where the grammar is complete; without `may_end` only
        where nothing else may.
        """
        ...


@dataclass(slots=True, eq=False)
class Request:
    """State of one choice of one request. Hot and mutable; only the engine thread touches it.

    token_ids    |<-- computed -->|<-- in flight -->|<-- not scheduled -->|
                 0     num_computed_tokens   num_scheduled_tokens     num_tokens <= num_foreseen_tokens
    """

    request_id: int
    """Unique among all choices of all requests of an engine."""
    token_ids: list[int]
    """Prompt, then output, as far as known."""
    num_prompt_tokens: int
    sampling: SamplingParams
    stopping: StoppingParams
    cache: CacheParams = field(default_factory=CacheParams)
    prompt_logprobs: int | None = None
    """How many alternatives to tell at each prompt position. None: say nothing of the prompt."""
    priority: int = 0
    """Lower runs earlier."""
    arrival: int = 0
    """Place in the order of arrival. Requests of one arrival differ in their choice."""
    choice: int = 0
    grammar: GrammarState | None = None
    """What the output must match, as far as its known tokens lead. It goes where token_ids go: preemption leaves it."""
    fork_of: Request | None = None
    """Choice 0 of the same request: where it runs, its prompt's blocks are shared, the partial one among them."""

    status: RequestStatus = RequestStatus.WAITING
    order: tuple[int, int, int] = (0, 0, 0)
    """Who runs first, and, from the end, who is preempted first. Set by the scheduler."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens after which the choice ends: the client's, and the model's where they count. Set by the scheduler."""
    max_num_tokens: int = field(init=False)
    """Tokens after which it ends, the prompt's among them. One is drawn even with max_tokens 0, and dropped: the prompt
    then runs for its log-probabilities."""
    num_computed_tokens: int = 0
    """Tokens [0, num_computed_tokens) are done with: their KV is in the table's blocks."""
    num_scheduled_tokens: int = 0
    """As num_computed_tokens will be when the steps in flight are committed."""
    num_foreseen_tokens: int = field(init=False)
    """Tokens known, and those that steps in flight will draw: their values are not known, their number is."""
    num_resident_tokens: int = 0
    """Tokens whose KV was there at admission. Their slots are shared and never written again. It exceeds
    num_computed_tokens by one where a whole prompt was resident: its last token runs, to be sampled from, unwritten."""
    num_cached_tokens: int | None = None
    """Prompt tokens reused at the first admission. None until then. Recompute after preemption is no hit."""
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0
    """Prompt positions, the first not counted, whose log-probabilities were told."""

    block_ids: list[int] = field(default_factory=list)
    """Block table: entry i holds tokens [i * block_size, (i + 1) * block_size)."""
    table_generation: int = 0
    """Counts how often the table was taken away. A step planned on an earlier table advances nothing."""
    block_digests: list[bytes] = field(default_factory=list)
    """Digests of the leading full blocks of token_ids, as far as computed. Never shrinks: tokens do not change."""
    num_chained_blocks: int = 0
    """Leading table entries that are the resident blocks of their digests. The next one may be registered (the chain
    rule) only when this equals its index."""
    may_register: bool = True
    """False from a reset of the cache until the table is taken away: the chain is gone."""
    registered_digests: list[bytes] = field(default_factory=list)
    """Digests this request made resident: they are dropped if it turns out to compute numbers that are not numbers."""
    awaited_digest: bytes | None = None
    """The next block a running twin is computing; this request waits for it."""
    num_writable_tokens: int = 0
    """Tokens up to here go into the table as it is. 0 where that is to be seen: a fork may share its partial block."""
    first_changed_block: int = 0
    """Table entries from here on are news to the runner, which sets this to len(block_ids) once it has copied them."""

    def __post_init__(self) -> None:
        self.max_num_tokens = self.num_prompt_tokens + max(1, self.stopping.max_tokens)
        self.num_foreseen_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose values are known."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that no step has computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that steps in flight will draw."""
        return self.num_foreseen_tokens - len(self.token_ids)

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens still to be computed, those in flight not counted. 0 where the last output token is on its way."""
        if self.num_foreseen_tokens >= self.max_num_tokens:
            return 0
        return self.num_foreseen_tokens - self.num_scheduled_tokens

    @property
    def reads_cache(self) -> bool:
        """Prompt log-probabilities need every position computed."""
        return not self.cache.bypass and self.prompt_logprobs is None

    @property
    def writes_cache(self) -> bool:
        return not (self.cache.bypass or self.cache.no_store)

    def move_to(self, status: RequestStatus) -> None:
        """Change status. Raises RuntimeError for a move that `_NEXT` does not allow: a bug in the scheduler."""
        if status not in _NEXT[self.status]:
            raise RuntimeError(f"request {self.request_id}: {self.status.value} -> {status.value} is no legal move")
        self.status = status
