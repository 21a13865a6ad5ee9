"""Each way of sampling beside transformers' own logits processor: the same tokens, with the same frequencies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvern.engine.device_copy import PinnedRing
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.engine.sampler import sample
from kvern.engine.sampling_state import SampledRows, SamplingState

VOCAB_SIZE = 24
COUNT = 20_000
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]

CASES: dict[str, tuple[SamplingParams, list[LogitsProcessor]]] = {
    "temperature": (SamplingParams(0.7), [TemperatureLogitsWarper(0.7)]),
    "top_k": (SamplingParams(1.0, top_k=6), [TopKLogitsWarper(6)]),
    "top_p": (SamplingParams(1.0, top_p=0.7), [TopPLogitsWarper(0.7)]),
    "min_p": (SamplingParams(1.0, min_p=0.1), [MinPLogitsWarper(0.1)]),
    "repetition_penalty": (SamplingParams(1.0, repetition_penalty=1.5), [RepetitionPenaltyLogitsProcessor(1.5)]),
    "bad_words": (
        SamplingParams(1.0, bad_words=[[2, 6, 11], [9, 6], [20]]),
        [NoBadWordsLogitsProcessor([[2, 6, 11], [9, 6], [20]])],
    ),
    "min_p after temperature": (
        SamplingParams(2.0, min_p=0.2),
        [TemperatureLogitsWarper(2.0), MinPLogitsWarper(0.2)],
    ),
    "all": (
        SamplingParams(1.5, 0.9, 12, min_p=0.02, repetition_penalty=1.2),
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(1.5),
            MinPLogitsWarper(0.02),
            TopKLogitsWarper(12),
            TopPLogitsWarper(0.9),
        ],
    ),
}


def count_draws(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Draw COUNT times from one row of logits, each time with another seed."""
    request = Request(0, PROMPT, len(PROMPT), sampling, StoppingParams(9))
    token_ids = torch.tensor([PROMPT], dtype=torch.int32)
    state = SamplingState(token_ids, VOCAB_SIZE, frozenset(), PinnedRing(token_ids.device, 1))
    state.add(0, request)
    inputs = state.select(SampledRows([request], [0], [0], [len(PROMPT)]))
    edited = logits[None].clone()
    for edit in inputs.edits:
        edit.apply(edited)
    assert inputs.random is not None
    columns = ("temperature", "log_min_p", "top_k", "top_p", "output_position")
    repeated = {name: getattr(inputs.random, name).expand(COUNT) for name in columns}
    random = replace(inputs.random, rows=torch.arange(COUNT), seed=torch.arange(COUNT), **repeated)
    return torch.bincount(sample(edited.repeat(COUNT, 1), random).token_ids, minlength=VOCAB_SIZE)


@pytest.mark.parametrize("case", CASES)
def test_draws_have_the_distribution_of_transformers(case: str) -> None:
    """Chi-square with fixed seeds: its mean is its freedom, its variance twice that, and six deviations are far out.

    D19: min_p looks at probabilities after temperature.
    """
    sampling, processors = CASES[case]
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 1.5
    scores = logits[None].clone()
    for processor in processors:
        scores = processor(torch.tensor([PROMPT]), scores)
    expected = torch.softmax(scores[0].double(), dim=-1) * COUNT
    observed = count_draws(logits, sampling)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    freedom = int(kept.sum()) - 1
    chi_square = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    assert chi_square < freedom + 6 * (2 * freedom) ** 0.5
