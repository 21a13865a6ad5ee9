"""Whole batches of mixed requests against a plain reference, one row and one token at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvern.engine.device_copy import PinnedRing
from kvern.engine.logits_processors import TokenBitmask
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.engine.sampler import sample
from kvern.engine.sampling_state import SampledRows, SamplingInputs, SamplingState

from .sampling_reference import next_token

VOCAB_SIZE = 203
MAX_LEN = 64
EOS = frozenset({2, 7})


@dataclass
class Batch:
    """Requests in slots of their own, which are not in the order of the rows."""

    requests: Sequence[Request]

    def __post_init__(self) -> None:
        self.slots = random.Random(1).sample(range(len(self.requests) + 3), len(self.requests))
        self.token_ids = torch.full((len(self.requests) + 3, MAX_LEN + 1), 5, dtype=torch.int32)
        self.state = SamplingState(self.token_ids, VOCAB_SIZE, EOS, PinnedRing(self.token_ids.device, 1))
        for request, slot in zip(self.requests, self.slots, strict=True):
            self.token_ids[slot, : request.num_tokens] = torch.tensor(request.token_ids, dtype=torch.int32)
            self.state.add(slot, request)

    def select(self) -> SamplingInputs:
        return self.state.select(self.sampled())

    def sampled(self) -> SampledRows:
        positions = [request.num_tokens for request in self.requests]
        return SampledRows(list(self.requests), list(range(len(self.requests))), self.slots, positions)

    def sample(self, logits: Tensor, bitmask: TokenBitmask | None = None) -> list[int | None]:
        """Sample a token a row, and take it in. None where nothing is allowed."""
        inputs = self.select()
        edits = inputs.edits if bitmask is None else [bitmask, *inputs.edits]
        drawn = sample(logits.clone(), inputs.random, edits)
        assert drawn.is_finite.all()
        assert drawn.token_ids.min() >= 0
        assert drawn.token_ids.max() < VOCAB_SIZE
        self.token_ids[inputs.slots, inputs.positions] = drawn.token_ids.int()
        self.state.count(inputs, drawn.token_ids)
        rows = zip(drawn.token_ids.tolist(), drawn.is_allowed.tolist(), strict=True)
        return [token_id if is_allowed else None for token_id, is_allowed in rows]


def make_logits(num_rows: int, seed: int) -> Tensor:
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.to(torch.bfloat16).float()


def make_request(number: int) -> Request:
    """A request that asks for a random part of everything. Few token ids occur, so that penalties and words hit."""
    rng = random.Random(number)

    def maybe(value: Any, neutral: Any) -> Any:
        return value if rng.random() < 0.4 else neutral

    few = rng.sample(range(VOCAB_SIZE), 40)
    prompt = rng.choices(few, k=rng.randint(1, 20))
    output = rng.choices(few, k=rng.randint(0, 20))
    words = [rng.choices(few, k=rng.randint(1, 3)) for _ in range(3)] + [
        [*(prompt + output)[-length:], token] for length, token in ((1, few[0]), (2, few[1]), (3, few[2]))
    ]
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 1.8]),
        top_p=maybe(0.8, 1.0),
        top_k=maybe(30, 0),
        seed=rng.getrandbits(64),
        min_p=maybe(0.05, 0.0),
        presence_penalty=maybe(1.5, 0.0),
        frequency_penalty=maybe(-0.7, 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        logit_bias=maybe({token: rng.uniform(-5, 9) for token in few[:5]}, {}),
        allowed_token_ids=maybe(few, ()),
        bad_words=maybe(rng.sample(words, rng.randint(1, 6)), ()),
    )
    stopping = StoppingParams(
        40, stop_token_ids=frozenset(few[: rng.randint(0, 6)]), ignore_eos=maybe(True, False), min_tokens=maybe(22, 0)
    )
    return Request(number, prompt + output, len(prompt), sampling, stopping)


@pytest.mark.parametrize("first", range(0, 90, 30))
def test_mixed_requests_over_several_steps_sample_what_the_reference_does(first: int) -> None:
    """D02, D19: temperature comes before min_p, and that before top_k and top_p. Counts follow what was sampled."""
    requests = [make_request(number) for number in range(first, first + 30)]
    batch = Batch(requests)
    for step in range(4):
        logits = make_logits(len(requests), 10 * first + step)
        expected = [next_token(row, request, EOS) for row, request in zip(logits.tolist(), requests, strict=True)]
        sampled = batch.sample(logits)
        assert sampled == expected
        for request, token_id in zip(requests, sampled, strict=True):
            request.token_ids.append(0 if token_id is None else token_id)


def test_row_samples_the_same_alone_and_in_company() -> None:
    """D17: bit for bit, whatever others ask for."""
    requests = [make_request(number) for number in range(40)]
    logits = make_logits(40, 0) * 0.01
    together = Batch(requests).sample(logits)
    assert together == [Batch([each]).sample(logits[row : row + 1])[0] for row, each in enumerate(requests)]


def test_edited_logits_are_bitwise_the_same_alone_and_in_company() -> None:
    requests = [make_request(number) for number in range(40)]
    logits = make_logits(40, 1)
    together = logits.clone()
    for edit in Batch(requests).select().edits:
        edit.apply(together)
    for row, request in enumerate(requests):
        alone = logits[row : row + 1].clone()
        for edit in Batch([request]).select().edits:
            edit.apply(alone)
        assert torch.equal(alone[0].view(torch.int32), together[row].view(torch.int32))


def test_request_that_comes_back_counts_its_tokens_again() -> None:
    """Recompute after preemption: a slot's counts are made from all tokens, not from what the slot held."""
    requests = [make_request(number) for number in range(12)]
    batch = Batch(requests)
    for step in range(3):
        sampled = batch.sample(make_logits(12, step))
        for request, token_id in zip(requests, sampled, strict=True):
            request.token_ids.append(0 if token_id is None else token_id)
    for slot in batch.slots:
        batch.state.forget(slot)
    for request, slot in zip(requests, batch.slots, strict=True):
        batch.token_ids[slot, : request.num_tokens] = torch.tensor(request.token_ids, dtype=torch.int32)
        batch.state.add(slot, request)
    logits = make_logits(12, 99)
    assert batch.sample(logits) == Batch(requests).sample(logits)


def test_requests_in_slots_of_others_sample_as_in_fresh_ones() -> None:
    batch = Batch([make_request(number) for number in range(40)])
    batch.sample(make_logits(40, 0))
    for slot in batch.slots:
        batch.state.forget(slot)
    batch.requests = [make_request(number) for number in range(100, 140)]
    for request, slot in zip(batch.requests, batch.slots, strict=True):
        batch.token_ids[slot, : request.num_tokens] = torch.tensor(request.token_ids, dtype=torch.int32)
        batch.state.add(slot, request)
    logits = make_logits(40, 1)
    edited, expected = logits.clone(), logits.clone()
    for edit in batch.select().edits:
        edit.apply(edited)
    for edit in Batch(batch.requests).select().edits:
        edit.apply(expected)
    assert torch.equal(edited, expected)


def test_plain_requests_have_no_edits_and_take_no_memory_for_any() -> None:
    requests = [Request(n, [1, 2, 3], 3, SamplingParams(seed=n), StoppingParams(5)) for n in range(8)]
    batch = Batch(requests)
    assert batch.select().edits == []
    assert batch.state.told(batch.sampled()) is None
    for processor in batch.state._processors:
        tensors = [each for each in vars(processor).values() if isinstance(each, Tensor)]
        assert all(each is batch.token_ids or each.numel() == 0 for each in tensors)


def test_slot_of_a_request_that_asked_for_everything_is_clean_for_the_next() -> None:
    sampling = SamplingParams(0.0, logit_bias={3: 50.0}, bad_words=[[4]], repetition_penalty=2.0)
    batch = Batch([Request(0, [1, 2], 2, sampling, StoppingParams(9, min_tokens=5))])
    [slot] = batch.slots
    batch.state.forget(slot)
    batch.requests = [Request(1, [1, 2], 2, SamplingParams(0.0), StoppingParams(9))]
    batch.state.add(slot, batch.requests[0])
    logits = make_logits(1, 5)
    assert batch.select().edits == []
    assert batch.sample(logits) == [int(logits.argmax())]


def test_bad_words_of_the_request_before_do_not_count() -> None:
    batch = Batch([Request(0, [1], 1, SamplingParams(0.0, bad_words=[[5], [6]]), StoppingParams(9))])
    [slot] = batch.slots
    batch.state.forget(slot)
    batch.requests = [Request(1, [1], 1, SamplingParams(0.0, bad_words=[[7]]), StoppingParams(9))]
    batch.state.add(slot, batch.requests[0])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [6, 7]] = torch.tensor([8.0, 9.0])
    assert batch.sample(logits) == [6]


def bitmask(allowed: dict[int, set[int]]) -> TokenBitmask:
    flags = np.zeros((len(allowed), -(-VOCAB_SIZE // 32) * 32), dtype=bool)
    for row, token_ids in enumerate(allowed.values()):
        flags[row, list(token_ids)] = True
    bits = np.packbits(flags, axis=1, bitorder="little").view(np.int32)
    return TokenBitmask(torch.tensor(list(allowed)), torch.from_numpy(bits))


def test_bitmask_of_some_rows_allows_only_its_tokens_there() -> None:
    requests = [make_request(number) for number in range(30)]
    rng = random.Random(5)
    # The sign bit of a word, and the last token, among them.
    allowed = {row: {31, 63, VOCAB_SIZE - 1, *rng.sample(range(VOCAB_SIZE), 60)} for row in range(3, 30, 4)}
    logits = make_logits(30, 8)
    expected = [
        next_token(line, requests[row], EOS, grammar=allowed.get(row)) for row, line in enumerate(logits.tolist())
    ]
    assert Batch(requests).sample(logits, bitmask(allowed)) == expected


def test_min_tokens_keeps_end_and_stop_tokens_out_until_it_is_reached() -> None:
    """A16: the stop token is by far the likeliest."""
    stopping = StoppingParams(9, frozenset({50}), min_tokens=2)
    request = Request(0, [1, 2, 3], 3, SamplingParams(0.0), stopping)
    batch = Batch([request])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [50, 2, 9]] = torch.tensor([9.0, 8.0, 1.0])
    for expected in (9, 9, 50):
        [token_id] = batch.sample(logits)
        assert token_id == expected
        request.token_ids.append(expected)


def test_min_tokens_where_only_end_tokens_are_allowed_gives_way() -> None:
    request = Request(0, [1], 1, SamplingParams(0.0), StoppingParams(9, min_tokens=5))
    logits = make_logits(1, 3)
    assert Batch([request]).sample(logits, bitmask({0: {7}})) == [7]
    assert Batch([request]).sample(logits, bitmask({0: {7, 100}})) == [100]


def test_bad_word_is_never_completed_though_it_began_in_the_prompt() -> None:
    sampling = SamplingParams(0.0, bad_words=[[10, 11, 12], [30]])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [30, 12, 40]] = torch.tensor([9.0, 8.0, 7.0])
    for prompt, expected in (([10, 11], 40), ([10, 5], 12), ([11], 12), ([9, 10, 11], 40), ([10, 11, 5], 12)):
        request = Request(0, list(prompt), len(prompt), sampling, StoppingParams(9))
        assert Batch([request]).sample(logits) == [expected]


def test_bad_word_longer_than_the_tokens_so_far_is_not_at_its_end() -> None:
    sampling = SamplingParams(0.0, bad_words=[[10, 10, 12]])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 12] = 8.0
    assert Batch([Request(0, [10], 1, sampling, StoppingParams(9))]).sample(logits) == [12]
    assert Batch([Request(0, [10, 10], 2, sampling, StoppingParams(9))]).sample(logits) != [12]


def test_masks_that_leave_no_token_fail_their_row_alone() -> None:
    sampling = SamplingParams(1.0, allowed_token_ids=[8], bad_words=[[8]])
    bad = Request(0, [1], 1, sampling, StoppingParams(9))
    others = [make_request(number) for number in (3, 4)]
    logits = make_logits(3, 6)
    expected = Batch(others).sample(logits[[0, 2]])
    assert Batch([others[0], bad, others[1]]).sample(logits) == [expected[0], None, expected[1]]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize(
    ("penalty", "is_right"),
    [(1e-38, lambda seen, logit: seen and logit > 0), (3e38, lambda seen, logit: not seen or logit > 0)],
)
def test_extreme_repetition_penalty_does_what_it_says(
    temperature: float, penalty: float, is_right: Callable[[bool, float], bool]
) -> None:
    prompt = list(range(0, 100, 2))
    logits = make_logits(20, 4)
    requests = [
        Request(
            number, prompt, 50, SamplingParams(temperature, seed=number, repetition_penalty=penalty), StoppingParams(9)
        )
        for number in range(20)
    ]
    for row, token_id in enumerate(Batch(requests).sample(logits)):
        assert token_id is not None
        assert is_right(token_id in prompt, float(logits[row, token_id]))


def test_bias_of_minus_100_on_the_greedy_token_keeps_it_out() -> None:
    """D07."""
    logits = make_logits(1, 2)
    best = int(logits.argmax())
    request = Request(0, [1], 1, SamplingParams(0.0, logit_bias={best: -100.0}), StoppingParams(9))
    logits_without = logits.clone()
    logits_without[0, best] = -torch.inf
    assert Batch([request]).sample(logits) == [int(logits_without.argmax())]
