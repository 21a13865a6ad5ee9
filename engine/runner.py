"""Executes the scheduler's plans on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvern.engine.batch import PersistentBatch, StepInputs
from kvern.engine.config import EngineConfig
from kvern.engine.kv_cache import allocate_kv
from kvern.engine.model import LoadedModel
from kvern.engine.plan import Plan, SampledToken
from kvern.engine.sampler import Sample, sample
from kvern.kernels.paged_attention import plan_attention

_NOT_SAMPLED = SampledToken(None)
_NOT_FINITE = SampledToken(None, error="the model's logits are not finite numbers")


@dataclass(frozen=True, slots=True)
class StepSubmission:
    """A step launched on the device. Implements `Submission`."""

    samples: list[bool]
    """Which plan entries sample."""
    sample: Sample | None
    """None where none of them does."""

    def result(self) -> list[SampledToken]:
        """Wait for the sampled tokens. One item per plan entry, in order."""
        if self.sample is None:
            return [_NOT_SAMPLED] * len(self.samples)
        rows = zip(self.sample.token_ids.tolist(), self.sample.ok.tolist(), strict=True)
        drawn = (SampledToken(token_id) if ok else _NOT_FINITE for token_id, ok in rows)
        return [next(drawn) if samples else _NOT_SAMPLED for samples in self.samples]


class ModelRunner:
    """Model, KV cache and persistent batch. Only the engine thread touches it. Implements `Runner`."""

    def __init__(self, model: LoadedModel, config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._module = model.module
        self._kv = allocate_kv(model, config.block_size, num_blocks)
        self._batch = PersistentBatch(config.max_num_seqs, max_model_len, config.block_size, model.device)

    @torch.inference_mode()
    def submit(self, plan: Plan) -> StepSubmission:
        """Launch one step. On a CPU it is done when this returns."""
        if not plan.entries:
            self._batch.forget(plan.removed_ids)
            return StepSubmission([], None)
        inputs = self._batch.prepare(plan)
        return StepSubmission([entry.samples for entry in plan.entries], self._run(inputs))

    def _run(self, inputs: StepInputs) -> Sample | None:
        attention = plan_attention(
            self._kv, inputs.block_table, inputs.cu_query_lens, inputs.context_lens, inputs.slot_mapping
        )
        hidden = self._module(inputs.token_ids, inputs.positions, attention, self._kv)
        if not len(inputs.sampled_rows):
            return None
        drawn = sample(self._module.logits(hidden[inputs.sampled_rows]), inputs.random)
        self._batch.append(inputs, drawn.token_ids)
        return drawn
