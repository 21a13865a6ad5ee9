"""A step on its way through the device, and what it brings back to the host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvern.engine.batch import PromptRows
from kvern.engine.device_copy import HostReader
from kvern.engine.logprobs import DeviceLogprobs
from kvern.engine.plan import PromptLogprobs, SampledToken, StepTimes, TokenLogprobs
from kvern.engine.sampling_state import LogprobRows

_CORRUPT = SampledToken(None, error="the model's logits are not finite numbers", is_corrupt=True)
_NOTHING_ALLOWED = "no token is left that may be sampled"


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

    def on_host(self) -> Iterator[SampledToken]:
        """Yield one token a row. Only when they have come."""
        logprobs = self.logprobs.on_host() if self.logprobs is not None else {}
        for row, (token_id, is_finite, is_allowed) in enumerate(zip(*self.drawn.tolist(), strict=True)):
            if is_finite and is_allowed:
                yield SampledToken(token_id, logprobs=logprobs.get(row))
            else:
                yield _CORRUPT if not is_finite else SampledToken(None, error=_NOTHING_ALLOWED)


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

    def result(self) -> list[SampledToken]:
        """Wait for the step. One item per plan entry, in order."""
        self.finish()
        started_ns = time.perf_counter_ns()
        tokens = self._on_host()
        self.times.forward_ns += time.perf_counter_ns() - started_ns
        return tokens

    def _on_host(self) -> list[SampledToken]:
        if self.end is not None:
            self.end.synchronize()
        drawn = self.drawn.on_host() if self.drawn is not None else iter(())
        tokens = [next(drawn) if samples else SampledToken(None) for samples in self.samples]
        for launched in self.prompts:
            entry = launched.prompt.entry
            tokens[entry] = _with_prompt(tokens[entry], launched.on_host())
        return tokens


def _with_prompt(token: SampledToken, prompt: PromptLogprobs) -> SampledToken:
    if any(math.isnan(item.logprob) for item in prompt.items):
        return _CORRUPT
    return replace(token, prompt_logprobs=prompt)
