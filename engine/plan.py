"""What scheduler, runner and service say to each other, once a step. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from kvern.engine.block_pool import CacheEvent
from kvern.engine.request import FinishReason, Request


@dataclass(slots=True)
class PlanEntry:
    """`num_tokens` tokens of one request, from token_ids[start] on. Prefill and decode are the same kind of entry."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the step reaches the request's last token, so that the next one is drawn. That last token may itself be
    pending: drawn by the step before, and known only on the device."""
    table_generation: int = 0
    """The table this was planned on."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class FirstScheduled:
    """A request is computed for the first time."""

    request_id: int
    cached_tokens: int
    """Prompt tokens whose KV is reused."""


@dataclass(slots=True)
class StepTimes:
    """Where the time of one step went on the host, in nanoseconds. What a runner does not measure stays 0.

    On a device that works by itself launching takes little, and waiting for the device is counted as `forward`: there
    its time is seen, sampling's included. With a step in flight it is the part that the host's own work did not hide.
    """

    commands_ns: int = 0
    """Taking in what arrived. Waiting for something to do is not counted."""
    schedule_ns: int = 0
    prepare_ns: int = 0
    """Laying out the step's inputs."""
    forward_ns: int = 0
    """Running the model, up to the logits."""
    sample_ns: int = 0
    """Drawing tokens. Where grammars have a say this may be after the next step was planned."""
    commit_ns: int = 0
    emit_ns: int = 0
    """Handing on the results before this step's, and that it computes requests for the first time."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """How large one step was, and what it took."""

    num_seqs: int
    num_tokens: int
    seconds: float
    """From the end of the step before, or since there was something to do, to its own end."""
    times: StepTimes


@dataclass
class Plan:
    """One step: who runs how many tokens. Complete once it is handed on."""

    entries: list[PlanEntry] = field(default_factory=list)
    removed_ids: list[int] = field(default_factory=list)
    """Request ids that left the running set since the last plan (finished, aborted, preempted): the runner forgets
    them. A preempted one comes back as if new."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) blocks to copy before the step: a shared partial block is about to be written."""
    first_scheduled: list[FirstScheduled] = field(default_factory=list)
    """Requests that this step computes for the first time."""
    times: StepTimes = field(default_factory=StepTimes)
    """Whoever works on the step adds to them."""

    @cached_property
    def num_tokens(self) -> int:
        return sum([entry.num_tokens for entry in self.entries])

    @cached_property
    def num_decodes(self) -> int:
        """Entries of one token."""
        return [entry.num_tokens for entry in self.entries].count(1)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decodes

    def __bool__(self) -> bool:
        return bool(self.entries)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found one token, and which ones it found most likely, before any processing."""

    logprob: float
    """Natural logarithm."""
    rank: int
    """1 is the most likely. Of equally likely tokens the lowest id comes first."""
    top_ids: Sequence[int] = ()
    """The most likely tokens, in order. The token itself may be among them."""
    top_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of successive prompt tokens, each after those before it. The first token has none."""

    request_id: int
    start: int
    """Position of the first item."""
    items: Sequence[TokenLogprobs]

    def beyond(self, num_told: int) -> PromptLogprobs:
        """Return those that come after the first `num_told` a prompt has. There may be none."""
        start = num_told + 1
        return PromptLogprobs(self.request_id, start, self.items[start - self.start :])


NOTHING_ALLOWED = "NOTHING_ALLOWED"
"""Reason of errors where what a request itself asks for leaves no token that may come."""


@dataclass(frozen=True, slots=True)
class DrawError:
    """Why no token could be drawn for an entry."""

    message: str
    is_corrupt: bool = False
    """Whether the logits were not numbers, so that the KV behind them cannot be trusted."""


@dataclass(slots=True)
class SampledTokens:
    """What the runner drew for a step. Most entries have a token and nothing else: the rest goes by index of entry."""

    token_ids: list[int | None]
    """One for each plan entry, in order. None where it does not sample, and where there is an error."""
    errors: dict[int, DrawError] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Of those that asked."""
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """Of prompt tokens that entries predict, where the request asked and was not told already. Not where there is an
    error."""


class Submission(Protocol):
    """A step on its way through the device."""

    def result(self) -> SampledTokens:
        """Wait for the step."""
        ...


class Runner(Protocol):
    """Executes plans. `ModelRunner` is the real one; the fleet simulation and tests bring others."""

    def submit(self, plan: Plan) -> Submission: ...


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """A choice is over; its last token, if any, came before or with this."""

    request_id: int
    reason: FinishReason
    stop_token_id: int | None = None
    preemptions: int = 0
    error: str = ""
    error_reason: str = ""
    """NOTHING_ALLOWED, or empty: then the fault is not the request's."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    """Blocks that a request holds."""
    queued_prefill_tokens: int = 0
    """Known tokens not computed yet."""
    num_failed_choices: int = 0
    """Choices ended since the start because their logits were not numbers."""
    num_parked: int = 0
    num_preemptions: int = 0
    """How often since the start a request's blocks were taken from it."""


@dataclass(slots=True)
class StepResult:
    """What one step brought. Entry i of the two columns is one token of one choice."""

    request_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By entry of the columns, for those that asked."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Told before the tokens of the same step."""
    scheduled: list[FirstScheduled] = field(default_factory=list)
    """Told before the step that computes them first is launched."""
    ended: list[ChoiceEnded] = field(default_factory=list)
    cache_events: list[CacheEvent] = field(default_factory=list)
    """What became cached and what stopped to be since the result before, in order, where the pool records it."""
    load: Load = field(default_factory=Load)
    step: StepStats | None = None
    """None where this is not what a step brought."""

    def take_logprobs(self, plan: Plan, sampled: SampledTokens) -> None:
        """Tell the log-probabilities of those tokens of a step that are in the columns."""
        entries = {request_id: entry for entry, request_id in enumerate(self.request_ids)}
        for index, logprobs in sampled.logprobs.items():
            entry = entries.get(plan.entries[index].request.request_id)
            if entry is not None:
                self.logprobs[entry] = logprobs
