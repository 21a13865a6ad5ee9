"""How long a simulated engine's step takes: a stated model of an H100, and one fitted to this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from kvern.engine.config import EngineConfig
from kvern.engine.plan import Plan
from kvern.engine.request import CacheParams, Request, SamplingParams, StoppingParams
from kvern.services.runtime.model_source import DEFAULT_MODEL, find_model


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step does, as far as its cost depends on it."""

    num_prefill_tokens: int
    num_decodes: int
    decode_context: int
    """KV entries that decodes read."""
    prefill_pairs: float
    """(token, earlier token) pairs that prefill attends over."""

    @classmethod
    def of(cls, plan: Plan) -> StepWork:
        prefill = decodes = context = 0
        pairs = 0.0
        for entry in plan.entries:
            count = entry.num_tokens
            if count == 1:
                decodes += 1
                context += entry.start
            else:
                prefill += count
                pairs += count * (entry.start + count / 2)
        return cls(prefill, decodes, context, pairs)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a sum, as if nothing overlapped."""

    step_s: float
    """What every step pays."""
    prefill_token_s: float
    decode_s: float
    context_token_s: float
    pair_s: float

    def seconds(self, plan: Plan) -> float:
        work = StepWork.of(plan)
        return (
            self.step_s
            + self.prefill_token_s * work.num_prefill_tokens
            + self.decode_s * work.num_decodes
            + self.context_token_s * work.decode_context
            + self.pair_s * work.prefill_pairs
        )


_FIT_OUTPUT_TOKENS = 8

_PARAMETERS = 8.0e9
_LAYERS, _HIDDEN = 32, 4096
KV_TOKEN_BYTES = 2 * _LAYERS * 8 * 128 * 2
_FLOPS = 0.5 * 989e12
_BYTES_PER_S = 0.75 * 3.35e12

H100 = StepCost(
    step_s=2 * _PARAMETERS / _BYTES_PER_S,
    prefill_token_s=2 * _PARAMETERS / _FLOPS,
    decode_s=20e-6,
    context_token_s=KV_TOKEN_BYTES / _BYTES_PER_S,
    pair_s=4 * _LAYERS * _HIDDEN / _FLOPS,
)
"""A dense model of 8 billion parameters in bfloat16 (32 layers, 4,096 wide, 8 KV heads of 128) on an H100 SXM.

Assumed, not measured: half of 989 TFLOP/s in matrix products and attention, three quarters of 3.35 TB/s in reading
weights and KV, 20 µs a decode for sampling and the host.
"""


def fit_this_machine() -> StepCost:
    """Run the default model in this process on prompts and answers of several lengths, and fit what its steps took.

    Takes some seconds, and means something on a machine that is idle otherwise.
    """
    # Imported here: the other cost model needs no numbers of this kind.
    import numpy as np

    plans = list(_measure_steps())
    work = np.array([(1, *astuple(each)) for each, _ in plans], dtype=float)
    seconds = np.array([each for _, each in plans])
    # Relative errors count: or the few long steps of prompts would say what a decode costs.
    relative = work / seconds[:, None]
    costs = np.zeros(work.shape[1])
    kept = list(range(work.shape[1]))
    while True:
        costs[kept], *_ = np.linalg.lstsq(relative[:, kept], np.ones(len(plans)), rcond=None)
        if costs[kept].min() >= 0:
            return StepCost(*costs.tolist())
        # Nothing costs less than nothing: what seems to is left out.
        dropped = min(kept, key=lambda index: costs[index])
        costs[dropped] = 0
        kept.remove(dropped)


def _measure_steps() -> Iterator[tuple[StepWork, float]]:
    """Yield what each step did, and its seconds. Rounds end when all answers have."""
    # Imported here: it brings torch.
    from kvern.engine.startup import start_engine

    model_path = find_model(DEFAULT_MODEL).path
    engine = start_engine(EngineConfig(model_path, num_blocks=1024, max_model_len=1024, max_num_batched_tokens=512))
    rounds = [[64], [64, 200], [900], [300, 100, 50], [100] * 8]
    for number, lengths in enumerate(rounds):
        for choice, length in enumerate(lengths):
            engine.scheduler.add(_uncached_request(16 * number + choice, length))
        while engine.scheduler.has_work:
            plan = engine.scheduler.schedule()
            start = time.perf_counter()
            sampled = engine.runner.submit(plan).result()
            seconds = time.perf_counter() - start
            engine.scheduler.commit(plan, sampled)
            if number > 0:  # the first warms up
                yield StepWork.of(plan), seconds


def _uncached_request(request_id: int, num_prompt_tokens: int) -> Request:
    return Request(
        request_id=request_id,
        token_ids=[1000 + position % 1000 for position in range(num_prompt_tokens)],
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(max_tokens=_FIT_OUTPUT_TOKENS, ignore_eos=True),
        cache=CacheParams(bypass=True),
        arrival=request_id,
    )
