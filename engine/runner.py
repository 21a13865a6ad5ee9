"""Executes the scheduler's plans on the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvern.engine.batch import PersistentBatch, PromptRows, StepInputs
from kvern.engine.config import EngineConfig
from kvern.engine.grammar_rows import GrammarRows, find_grammar_rows
from kvern.engine.kv_cache import allocate_kv
from kvern.engine.logits_processors import LogitsEdit
from kvern.engine.logprobs import DeviceLogprobs, gather_logprobs
from kvern.engine.model.loader import LoadedModel
from kvern.engine.plan import Plan, PromptLogprobs, SampledToken, StepTimes, TokenLogprobs
from kvern.engine.sampler import Sample, sample
from kvern.engine.sampling_state import LogprobRows
from kvern.kernels.paged_attention import plan_attention, warm_up

_CORRUPT = SampledToken(None, error="the model's logits are not finite numbers", is_corrupt=True)
_NOTHING_ALLOWED = "no token is left that may be sampled"

_MAX_LOGITS_BYTES = 32 * 2**20
"""Of the logits of prompt tokens that are made at once."""


@dataclass(frozen=True, slots=True)
class LaunchedPrompt:
    """Log-probabilities of one entry's prompt tokens, on the device."""

    prompt: PromptRows
    pieces: list[DeviceLogprobs]

    def on_host(self) -> PromptLogprobs:
        """Wait for them."""
        tops = [[self.prompt.num_top] * len(piece.ranks) for piece in self.pieces]
        items = [item for piece, top in zip(self.pieces, tops, strict=True) for item in piece.on_host(top)]
        return PromptLogprobs(self.prompt.request_id, self.prompt.start, items)


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """Log-probabilities of sampled tokens, on the device."""

    told: LogprobRows
    logprobs: DeviceLogprobs

    def on_host(self) -> dict[int, TokenLogprobs]:
        """Wait for them, by sampled row."""
        return dict(zip(self.told.indices, self.logprobs.on_host(self.told.num_top), strict=True))


@dataclass(frozen=True, slots=True)
class LaunchedSample:
    """A step's sampled rows, on the device."""

    sample: Sample
    logprobs: LaunchedLogprobs | None
    """None where nobody asked."""

    def on_host(self) -> Iterator[SampledToken]:
        """Wait for the tokens, and yield one a row."""
        token_ids = self.sample.token_ids.tolist()
        logprobs = self.logprobs.on_host() if self.logprobs is not None else {}
        checks = zip(self.sample.is_finite.tolist(), self.sample.is_allowed.tolist(), strict=True)
        for row, (is_finite, is_allowed) in enumerate(checks):
            if is_finite and is_allowed:
                yield SampledToken(token_ids[row], logprobs=logprobs.get(row))
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
    drawn: LaunchedSample | None = None

    def finish(self) -> None:
        """Sample the step, if that is still to be done."""
        if self.draw is not None:
            started_ns = time.perf_counter_ns()
            self.drawn, self.draw = self.draw(), None
            self.times.sample_ns += time.perf_counter_ns() - started_ns

    def result(self) -> list[SampledToken]:
        """Wait for the step. One item per plan entry, in order."""
        self.finish()
        started_ns = time.perf_counter_ns()
        tokens = self._on_host()
        self.times.forward_ns += time.perf_counter_ns() - started_ns
        return tokens

    def _on_host(self) -> list[SampledToken]:
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


class ModelRunner:
    """Model, KV cache and persistent batch. Only the engine thread touches it. Implements `Runner`."""

    def __init__(self, model: LoadedModel, config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._module = model.module
        self._sliding_windows = set(model.config.sliding_windows)
        self._kv = allocate_kv(model, config.block_size, num_blocks)
        warm_up(self._kv)
        self._vocab_size = model.config.vocab_size
        self._batch = PersistentBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.block_size,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.eos_token_ids,
            device=model.device,
        )
        self._last = StepSubmission([], [], None, StepTimes())

    @torch.inference_mode()
    def submit(self, plan: Plan) -> StepSubmission:
        """Launch one step, once the step before is sampled. On a CPU it is done when this returns."""
        self._last.finish()
        if not plan.entries:
            self._batch.forget(plan.removed_ids)
            return StepSubmission([], [], None, plan.times)
        started_ns = time.perf_counter_ns()
        self._copy_blocks(plan.block_copies)
        inputs = self._batch.prepare(plan)
        prepared_ns = time.perf_counter_ns()
        hidden = self._run(inputs)
        prompts = [LaunchedPrompt(prompt, self._predict(hidden, prompt)) for prompt in inputs.prompts]
        grammars = find_grammar_rows([entry.request for entry in plan.entries if entry.samples])
        draw = self._prepare_draw(hidden, inputs, grammars)
        plan.times.prepare_ns = prepared_ns - started_ns
        plan.times.forward_ns = time.perf_counter_ns() - prepared_ns
        self._last = StepSubmission([entry.samples for entry in plan.entries], prompts, draw, plan.times)
        if grammars is None:
            self._last.finish()
        return self._last

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            sources, destinations = torch.tensor(copies, device=self._kv.device).unbind(1)
            self._kv[destinations] = self._kv[sources]

    def _run(self, inputs: StepInputs) -> Tensor:
        """Return the hidden states of all of the step's tokens."""
        attention = plan_attention(
            self._kv,
            inputs.block_table,
            inputs.cu_query_lens,
            inputs.context_lens,
            inputs.slot_mapping,
            self._sliding_windows,
        )
        hidden: Tensor = self._module(inputs.token_ids, inputs.positions, attention, self._kv)
        return hidden

    def _prepare_draw(
        self, hidden: Tensor, inputs: StepInputs, grammars: GrammarRows | None
    ) -> Callable[[], LaunchedSample] | None:
        """Compute the logits to be sampled, and return what samples them. None: no entry samples."""
        if not len(inputs.sampling.rows):
            return None
        logits = self._module.logits(hidden[inputs.sampling.rows])
        return partial(self._sample, logits, inputs, grammars)

    @torch.inference_mode()
    def _sample(self, logits: Tensor, inputs: StepInputs, grammars: GrammarRows | None) -> LaunchedSample:
        sampling = inputs.sampling
        edits: list[LogitsEdit] = [*sampling.edits]
        if grammars is not None:
            edits.insert(0, grammars.bitmask(self._vocab_size, logits.device))
        told = sampling.logprobs
        raw = logits[:0] if told is None else logits[told.rows]  # a copy, as sampling edits logits in place
        drawn = sample(logits, sampling.random, edits)
        self._batch.append(inputs, drawn.token_ids)
        if told is None:
            return LaunchedSample(drawn, None)
        logprobs = gather_logprobs(raw, drawn.token_ids[told.rows], told.num_top)
        return LaunchedSample(drawn, LaunchedLogprobs(told, logprobs))

    def _predict(self, hidden: Tensor, prompt: PromptRows) -> list[DeviceLogprobs]:
        """Look up a prompt's tokens, piece by piece: the logits of all would take gigabytes."""
        piece_len = max(1, _MAX_LOGITS_BYTES // (4 * self._vocab_size))
        states, token_ids = (torch.split(whole, piece_len) for whole in (hidden[prompt.rows], prompt.token_ids))
        pieces = zip(states, token_ids, strict=True)
        return [
            gather_logprobs(self._module.logits(states), token_ids, [prompt.num_top] * len(token_ids))
            for states, token_ids in pieces
        ]
