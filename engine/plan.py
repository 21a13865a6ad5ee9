"""What scheduler, runner and service say to each other, once a step. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvern.engine.request import FinishReason, Request


@dataclass(slots=True)
class PlanEntry:
    """`num_tokens` tokens of one request, from token_ids[start] on. Prefill and decode are the same kind of entry."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the step reaches the last known token, so that the next one is drawn."""


@dataclass(slots=True)
class Plan:
    """One step: who runs how many tokens."""

    entries: list[PlanEntry] = field(default_factory=list)
    removed_ids: list[int] = field(default_factory=list)
    """Request ids that left the running set since the last plan (finished, aborted, preempted): the runner forgets
    them. A preempted one comes back as if new."""

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    def __bool__(self) -> bool:
        return bool(self.entries)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the runner drew for one entry."""

    token_id: int | None
    """None where the entry does not sample, and where `error` is set."""
    error: str = ""
    """Why no token could be drawn, say logits that are not numbers."""


class Submission(Protocol):
    """A step on its way through the device."""

    def result(self) -> list[SampledToken]:
        """Wait for the step. One item per plan entry, in order."""
        ...


class Runner(Protocol):
    """Executes plans. `ModelRunner` is the real one; the fleet simulation and tests bring others."""

    def submit(self, plan: Plan) -> Submission: ...


@dataclass(frozen=True, slots=True)
class FirstScheduled:
    """A request is computed for the first time."""

    request_id: int
    cached_tokens: int
    """Prompt tokens whose KV is reused."""


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """A choice is over; its last token, if any, came before or with this."""

    request_id: int
    choice: int
    reason: FinishReason
    stop_token_id: int | None = None
    preemptions: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    """Blocks that a request holds."""
    queued_prefill_tokens: int = 0
    """Known tokens not computed yet."""


@dataclass(slots=True)
class StepResult:
    """What one step brought. Entry i of the three columns is one token of one choice."""

    request_ids: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scheduled: list[FirstScheduled] = field(default_factory=list)
    ended: list[ChoiceEnded] = field(default_factory=list)
    load: Load = field(default_factory=Load)
