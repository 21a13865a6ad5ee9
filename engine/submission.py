"""A step on its way through the device, and what it brings back to the host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvern.engine.batch import PromptRows
from kvern.engine.device_copy import HostReader
from kvern.engine.logprobs import DeviceLogprobs
from kvern.engine.plan import DrawError, PromptLogprobs, SampledTokens, StepTimes, TokenLogprobs
from kvern.engine.sampling_state import LogprobRows

_CORRUPT = DrawError("the model's logits are not finite numbers", is_corrupt=True)
_NOTHING_ALLOWED = DrawError("no token is left that may be sampled")


@dataclass(frozen=True, slots=True)
class LaunchedPrompt:
    """Log-probabilities of one entry's prompt tokens, on their way to the host."""

    prompt: PromptRows
    pieces: list[DeviceLogprobs]

    def on_host(self) -> PromptLogprobs:
        """Return them. Only when they have come."""
        tops = [[self.prompt.num_top] * len(piece.ranks) for piece in self.pieces]
        items = [item for piece, top in zip(self.pieces, tops, strict=True) for item in piece.on_host(top)]
        return PromptLogprobs(self.prompt.request_id, self.prompt.start, items)


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """Log-probabilities of sampled tokens, on their way to the host."""

    told: LogprobRows
    logprobs: DeviceLogprobs

    def on_host(self) -> dict[int, TokenLogprobs]:
        """Return them by sampled row. Only when they have come."""
        return dict(zip(self.told.indices, self.logprobs.on_host(self.told.num_top), strict=True))


@dataclass(frozen=True, slots=True)
class LaunchedSample:
    """A step's sampled rows, on their way to the host."""

    drawn: Tensor
    """[3, num_rows] int64: token ids, whether the logits are finite, whether any token is allowed."""
    logprobs: LaunchedLogprobs | None
    """None where nobody asked."""

    def put(self, sampled: SampledTokens, entries: Sequence[int]) -> None:
        """Put what was drawn for each row where its plan entry is. Only when they have come."""
        for entry, token_id, is_finite, is_allowed in zip(entries, *self.drawn.tolist(), strict=True):
            if is_finite and is_allowed:
                sampled.token_ids[entry] = token_id
            else:
                sampled.errors[entry] = _NOTHING_ALLOWED if is_finite else _CORRUPT
        if self.logprobs is not None:
            sampled.logprobs |= {entries[row]: logprobs for row, logprobs in self.logprobs.on_host().items()}


@dataclass(slots=True)
class StepSubmission:
    """A step launched on the device. Implements `Submission`.

    A step that grammars have a say in is sampled late. What they allow follows from the token before, which a step in
    flight may still be drawing when this one is launched. When the next step is launched, or this one's result wanted,
    the step before this one has been committed, and the grammars have come as far as they must.
    """

    samples: list[bool]
    """Which plan entries sample."""
    prompts: list[LaunchedPrompt]
    draw: Callable[[], LaunchedSample] | None
    """Samples the step. None once that is done, and where no entry samples."""
    times: StepTimes
    reader: HostReader
    drawn: LaunchedSample | None = None
    end: Any = None
    """The event of `HostReader.mark`: all is done and on the host. None: it is."""

    def finish(self) -> None:
        """Sample the step, if that is still to be done."""
        if self.draw is not None:
            started_ns = time.perf_counter_ns()
            self.drawn, self.draw = self.draw(), None
            self.end = self.reader.mark()
            self.times.sample_ns += time.perf_counter_ns() - started_ns

    def result(self) -> SampledTokens:
        """Wait for the step."""
        self.finish()
        started_ns = time.perf_counter_ns()
        sampled = self._on_host()
        self.times.forward_ns += time.perf_counter_ns() - started_ns
        return sampled

    def _on_host(self) -> SampledTokens:
        if self.end is not None:
            self.end.synchronize()
        sampled = SampledTokens([None] * len(self.samples))
        if self.drawn is not None:
            self.drawn.put(sampled, [entry for entry, samples in enumerate(self.samples) if samples])
        for launched in self.prompts:
            _put_prompt(sampled, launched.prompt.entry, launched.on_host())
        return sampled


def _put_prompt(sampled: SampledTokens, entry: int, prompt: PromptLogprobs) -> None:
    if any(math.isnan(item.logprob) for item in prompt.items):
        sampled.token_ids[entry], sampled.errors[entry] = None, _CORRUPT
    else:
        sampled.prompt_logprobs[entry] = prompt
