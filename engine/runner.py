"""Executes the scheduler's plans on the device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from kvern.engine.batch import PersistentBatch, PromptRows, StepInputs
from kvern.engine.buckets import Bucket, make_buckets
from kvern.engine.config import EngineConfig
from kvern.engine.cuda_graphs import Capture, Progress, StepGraphs
from kvern.engine.device_copy import HostReader, PinnedRing
from kvern.engine.errors import ConfigError
from kvern.engine.fused_sampler import FusedSampler
from kvern.engine.grammar_rows import GrammarRows, find_grammar_rows
from kvern.engine.kv_cache import allocate_kv
from kvern.engine.logits_processors import LogitsEdit
from kvern.engine.logprobs import DeviceLogprobs, gather_logprobs
from kvern.engine.model.language_model import Forward, LanguageModel
from kvern.engine.model.loader import LoadedModel
from kvern.engine.model.ops import choose_ops
from kvern.engine.plan import Plan, StepTimes
from kvern.engine.sampler import sample
from kvern.engine.sampling_state import SampledRows
from kvern.engine.submission import LaunchedLogprobs, LaunchedPrompt, LaunchedSample, StepSubmission
from kvern.kernels.block_copy import copy_blocks
from kvern.kernels.paged_attention import SplitList, allocate_split_lists, choose_backend, plan_attention, warm_up

_MAX_LOGITS_BYTES = 32 * 2**20
"""Of the logits of prompt tokens that are made at once."""

_NUM_BUFFERS = 3
"""Of host memory that a step's numbers are copied from: for a step in flight, and two more."""


class ModelRunner:
    """Model, KV cache and persistent batch. Only the engine thread touches it. Implements `Runner`."""

    def __init__(self, model: LoadedModel, config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._device = model.device
        self._module = model.module
        self._shard = model.shard
        self._sliding_windows = set(model.config.sliding_windows)
        self._kv = allocate_kv(model, config.block_size, num_blocks)
        self._kv_scales = model.kv_scales
        self.attention_backend = _choose_backend(self._kv, config.attention_backend)
        warm_up(self._kv)
        self._vocab_size = model.config.vocab_size
        self._ring = PinnedRing(model.device, _NUM_BUFFERS)
        self._batch = PersistentBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.block_size,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.eos_token_ids,
            ring=self._ring,
        )
        uses_kernels = self.attention_backend == "triton"
        self._module.use(choose_ops(model.dtype, device=model.device, uses_triton=uses_kernels))
        self._forward = _compile(self._module, self._kv, self.attention_backend, config.max_num_batched_tokens)
        self._sampler = FusedSampler(self._batch, self._vocab_size, self._ring) if uses_kernels else None
        self._reader = HostReader(model.device)
        self.graphs: StepGraphs | None = None
        """None: every step is launched piece by piece."""
        self._buckets = make_buckets(config.max_num_seqs, config.max_num_batched_tokens)
        self._last = StepSubmission([], [], None, StepTimes(), self._reader)

    @property
    def kv_bytes(self) -> int:
        return self._kv.nbytes

    @property
    def can_capture(self) -> bool:
        """Whether steps may be graphs: all they do is launched by Triton and torch, and known not to wait."""
        return self._sampler is not None and self._module.is_capturable

    @torch.inference_mode()
    def capture(self, capture: Capture, progress: Progress) -> None:
        """Make graphs of steps' work on the device. On the engine's thread, before any request."""
        assert self._sampler is not None, "only where can_capture"
        num_entries, max_num_blocks = self._batch.table_shape
        max_context_len = max_num_blocks * self._kv.shape[4]
        split_lists = allocate_split_lists(self._device, num_entries, max_context_len, self._sliding_windows)

        def forward(entries: Tensor, rows: Tensor, bucket: Bucket) -> Tensor:
            hidden = self._run(entries, bucket.num_tokens, max_num_blocks, bucket.is_decode, split_lists)
            return self._module.logits(hidden[rows])

        graphs = StepGraphs(self._buckets, forward, self._sampler.draw, self._vocab_size, self._ring)
        graphs.capture(capture, progress)
        self.graphs = graphs

    @torch.inference_mode()
    def submit(self, plan: Plan) -> StepSubmission:
        """Launch one step, once the step before is sampled. On a CPU it is done when this returns."""
        self._last.finish()
        if not plan.entries:
            self._batch.forget(plan.removed_ids)
            return StepSubmission([], [], None, plan.times, self._reader)
        started_ns = time.perf_counter_ns()
        self._ring.turn()
        self._copy_blocks(plan.block_copies)
        inputs = self._batch.prepare(plan)
        grammars = find_grammar_rows(inputs.sampled.requests, self._shard)
        prepared_ns = time.perf_counter_ns()
        self._last = self._launch(inputs, grammars, [entry.samples for entry in plan.entries], plan.times)
        plan.times.prepare_ns = prepared_ns - started_ns
        plan.times.forward_ns = time.perf_counter_ns() - prepared_ns
        if grammars is None:
            self._last.finish()
        return self._last

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        sources, destinations = self._ring.to_device(list(zip(*copies, strict=True)))
        if self._sampler is None:
            self._kv[destinations] = self._kv[sources]
            return
        # What one copy reads, another may write, where the block was given up in between.
        is_free_of_order = {source for source, _ in copies}.isdisjoint(destination for _, destination in copies)
        num_at_once = len(copies) if is_free_of_order else 1
        for part in zip(sources.split(num_at_once), destinations.split(num_at_once), strict=True):
            copy_blocks(self._kv, *part)

    def _launch(
        self, inputs: StepInputs, grammars: GrammarRows | None, samples: list[bool], times: StepTimes
    ) -> StepSubmission:
        """Launch a step up to its logits, as a graph where there is one for it."""
        bucket = self.graphs.find(inputs) if self.graphs is not None else None
        prompts: list[LaunchedPrompt] = []
        if bucket is None:
            logits, prompts = self._launch_in_pieces(inputs)
        else:
            assert self.graphs is not None
            assert self._sampler is not None
            logits = self.graphs.forward(bucket, inputs, self._sampler.columns(inputs.sampled, grammars))
        draw = partial(self._sample, logits, inputs, grammars, bucket) if len(inputs.sampled) else None
        return StepSubmission(samples, prompts, draw, times, self._reader, end=self._reader.mark())

    def _launch_in_pieces(self, inputs: StepInputs) -> tuple[Tensor, list[LaunchedPrompt]]:
        entries, rows = (self._ring.to_device(numbers) for numbers in (inputs.entries, inputs.sampled.rows))
        num_blocks = -(-inputs.longest_context // self._kv.shape[4])
        hidden = self._run(entries, inputs.num_tokens, num_blocks, inputs.is_decode)
        prompts = [LaunchedPrompt(prompt, self._predict(hidden, prompt)) for prompt in inputs.prompts]
        return self._module.logits(hidden[rows]) if len(rows) else hidden, prompts

    def _run(
        self,
        entries: Tensor,
        num_tokens: int,
        num_blocks: int,
        is_decode: bool,
        split_lists: Mapping[int | None, SplitList] | None = None,
    ) -> Tensor:
        """Return the hidden states of all of a step's tokens. Arguments as in `PersistentBatch.lay_out`."""
        layout = self._batch.lay_out(entries, num_tokens, num_blocks)
        attention = plan_attention(
            self._kv,
            layout.block_table,
            layout.cu_query_lens,
            layout.context_lens,
            layout.slot_mapping,
            self._sliding_windows,
            backend=self.attention_backend,
            max_query_len=1 if is_decode else None,
            kv_scales=self._kv_scales,
            split_lists=split_lists,
            is_padding=layout.is_padding,
        )
        return self._forward(layout.token_ids, layout.positions, attention, self._kv)

    @torch.inference_mode()
    def _sample(
        self, logits: Tensor, inputs: StepInputs, grammars: GrammarRows | None, bucket: Bucket | None
    ) -> LaunchedSample:
        told = self._batch.sampling.told(inputs.sampled)
        raw = logits[:0] if told is None else logits[told.rows]  # a copy, as sampling edits logits in place
        drawn = self._draw(logits, inputs.sampled, grammars, bucket)
        on_host = self._reader.copy(drawn)
        if told is None:
            return LaunchedSample(on_host, None)
        logprobs = gather_logprobs(raw, drawn[0, told.rows], told.num_top).copied(self._reader.copy)
        return LaunchedSample(on_host, LaunchedLogprobs(told, logprobs))

    def _draw(
        self, logits: Tensor, sampled: SampledRows, grammars: GrammarRows | None, bucket: Bucket | None
    ) -> Tensor:
        """Return token ids, whether logits are finite, whether any token is allowed: [3, num_sampled] int64."""
        if self._sampler is None or not self._sampler.can_draw(sampled):
            return self._draw_with_torch(logits, sampled, grammars)
        if grammars is not None:
            self._sampler.copy_mask(grammars, self._vocab_size)
        if self.graphs is not None and bucket is not None:
            return self.graphs.draw(bucket, len(sampled))
        return self._sampler.draw(logits, self._ring.to_device(self._sampler.columns(sampled, grammars)))

    def _draw_with_torch(self, logits: Tensor, sampled: SampledRows, grammars: GrammarRows | None) -> Tensor:
        sampling = self._batch.sampling.select(sampled)
        edits: list[LogitsEdit] = [*sampling.edits]
        if grammars is not None:
            edits.insert(0, grammars.bitmask(self._vocab_size, self._ring))
        drawn = sample(logits, sampling.random, edits)
        self._batch.append(sampling, drawn.token_ids)
        return torch.stack((drawn.token_ids, drawn.is_finite.long(), drawn.is_allowed.long()))

    def _predict(self, hidden: Tensor, prompt: PromptRows) -> list[DeviceLogprobs]:
        """Look up a prompt's tokens, piece by piece: the logits of all would take gigabytes."""
        piece_len = max(1, _MAX_LOGITS_BYTES // (4 * self._vocab_size))
        states, token_ids = (torch.split(whole, piece_len) for whole in (hidden[prompt.rows], prompt.token_ids))
        pieces = zip(states, token_ids, strict=True)
        return [
            gather_logprobs(self._module.logits(states), token_ids, [prompt.num_top] * len(token_ids)).copied(
                self._reader.copy
            )
            for states, token_ids in pieces
        ]


def _compile(module: LanguageModel, kv: Tensor, attention_backend: str, max_num_tokens: int) -> Forward:
    """Return what computes hidden states."""
    if attention_backend != "numba":
        return module
    from kvern.engine.model.cpu_decoder import compile_decoder

    return compile_decoder(module, kv, max_num_tokens)


def _choose_backend(kv: Tensor, requested: str) -> str:
    try:
        return choose_backend(kv, requested)
    except ValueError as error:
        raise ConfigError("attention_backend", str(error)) from error
