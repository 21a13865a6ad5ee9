"""The runner on plans made by hand: the same tokens as transformers, however the work is cut."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvern.engine.config import EngineConfig
from kvern.engine.model.loader import LoadedModel, load_model
from kvern.engine.plan import Plan, PlanEntry, SampledTokens
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.engine.runner import ModelRunner
from kvern.engine.sampler import RandomRows, sample

from .reference import NUM_TOKENS
from .tiny_llama import PROMPT, load, logits_of, make_tiny, save_tiny

Reference = dict[tuple[int, ...], list[int]]

BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
NUM_BLOCKS = 1024


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LoadedModel:
    return load_model(EngineConfig(smollm2_path, dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return load(path)


def make_runner(model: LoadedModel, **options: int) -> ModelRunner:
    config = EngineConfig(model_path=model.path, block_size=BLOCK_SIZE, **options)  # type: ignore[arg-type]
    return ModelRunner(model, config, NUM_BLOCKS, MAX_MODEL_LEN)


@dataclass
class Driver:
    """Stands in for scheduler and pool: every request gets blocks of its own, out of order."""

    runner: ModelRunner
    free_blocks: list[int] = field(default_factory=lambda: random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS))
    removed_ids: list[int] = field(default_factory=list)
    num_requests: int = 0

    def request(self, prompt: list[int] | tuple[int, ...], sampling: SamplingParams | None = None) -> Request:
        self.num_requests += 1
        sampling = sampling or SamplingParams(temperature=0)
        return Request(self.num_requests, list(prompt), len(prompt), sampling, StoppingParams(NUM_TOKENS))

    def entry(self, request: Request, num_tokens: int | None = None) -> PlanEntry:
        """Plan a request's next tokens, all known ones or `num_tokens`, with blocks for them."""
        start = request.num_computed_tokens
        count = min(num_tokens or request.num_tokens, request.num_tokens - start)
        while len(request.block_ids) * BLOCK_SIZE < start + count:
            request.block_ids.append(self.free_blocks.pop())
        return PlanEntry(request, start, count, samples=start + count == request.num_tokens)

    def step(self, entries: list[PlanEntry]) -> SampledTokens:
        """Run one step and take in what it sampled."""
        plan = Plan(entries, self.removed_ids)
        self.removed_ids = []
        sampled = self.runner.submit(plan).result()
        for entry, token_id in zip(entries, sampled.token_ids, strict=True):
            entry.request.num_computed_tokens += entry.num_tokens
            assert (token_id is not None) == entry.samples
            if token_id is not None:
                entry.request.token_ids.append(token_id)
        return sampled

    def remove(self, request: Request) -> None:
        self.removed_ids.append(request.request_id)

    def generate(self, requests: list[Request], num_tokens: int, chunk: int | None = None) -> list[list[int]]:
        """Run requests side by side until each has that many output tokens."""
        while unfinished := [request for request in requests if request.num_output_tokens < num_tokens]:
            self.step([self.entry(request, chunk) for request in unfinished])
        for request in requests:
            self.remove(request)
        return [request.token_ids[request.num_prompt_tokens :] for request in requests]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_near_transformers(smollm2_path: Path, reference_tokens: Reference, dtype: str) -> None:
    """I11: after the reference's own tokens up to a place, the next one is nearly always the same."""
    driver = Driver(make_runner(load_model(EngineConfig(smollm2_path, dtype=dtype, device="cpu"))))
    short = {prompt: tokens for prompt, tokens in reference_tokens.items() if len(prompt) < 40}
    cases = [([*prompt, *tokens[:place]], tokens[place]) for prompt, tokens in short.items() for place in (0, 20)]
    sampled = driver.generate([driver.request(prompt) for prompt, _ in cases], 1)
    agreed = [tokens == [expected] for tokens, (_, expected) in zip(sampled, cases, strict=True)]
    assert sum(agreed) >= 0.9 * len(agreed)


def test_tokens_of_a_small_model_do_not_depend_on_company_or_chunks(tiny: LoadedModel) -> None:
    """Requests of all kinds come and go; each gets what it gets alone."""
    samplings = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, seed=2**64 - 1),
        SamplingParams(temperature=1.2, top_k=20, seed=7),
        SamplingParams(temperature=1.0, top_p=0.8, seed=2**63),
    ]
    prompts = [PROMPT[: 5 + 4 * number] for number in range(16)]
    alone = []
    for number, prompt in enumerate(prompts):
        driver = Driver(make_runner(tiny))
        alone += driver.generate([driver.request(prompt, samplings[number % 4])], 20)
    driver = Driver(make_runner(tiny, max_num_seqs=8))
    requests = [driver.request(prompt, samplings[number % 4]) for number, prompt in enumerate(prompts)]
    together = driver.generate(requests[:8], 20, chunk=3) + driver.generate(requests[8:], 20, chunk=11)
    assert together == alone


def test_draws_are_keyed_by_seed_and_output_position_whatever_the_choice(tiny: LoadedModel) -> None:
    driver = Driver(make_runner(tiny))
    request = driver.request(PROMPT[:20], SamplingParams(temperature=1.5, top_k=30, top_p=0.9, seed=2**63 + 2**40 + 5))
    request.choice = 3
    [tokens] = driver.generate([request], 8)
    random = RandomRows(
        rows=torch.arange(8),
        temperature=torch.full((8,), 1.5),
        log_min_p=torch.full((8,), float("-inf")),
        top_k=torch.full((8,), 30),
        top_p=torch.full((8,), 0.9, dtype=torch.float64),
        seed=torch.full((8,), 2**40 + 5 - 2**63),
        output_position=torch.arange(8),
        has_min_p=False,
        has_top_k=True,
        has_top_p=True,
    )
    assert sample(logits_of(tiny, request.token_ids)[19:-1], random).token_ids.tolist() == tokens


def test_request_that_was_preempted_and_comes_back_in_the_same_plan_goes_on(tiny: LoadedModel) -> None:
    driver = Driver(make_runner(tiny, max_num_seqs=2))
    sampling = SamplingParams(temperature=1.0, seed=3)
    [expected] = driver.generate([driver.request(PROMPT[:20], sampling)], 12)
    request, other = driver.request(PROMPT[:20], sampling), driver.request(PROMPT[:30])
    driver.generate([request, other], 5)
    assert driver.removed_ids == [request.request_id, other.request_id]
    request.num_computed_tokens, request.block_ids = 0, []
    assert driver.generate([request], 12) == [expected]


def test_removed_requests_leave_their_slots_to_others(tiny: LoadedModel) -> None:
    driver = Driver(make_runner(tiny, max_num_seqs=2))
    [expected] = driver.generate([driver.request(PROMPT)], 3)
    for _ in range(5):
        assert driver.generate([driver.request(PROMPT), driver.request(PROMPT[:3])], 3)[0] == expected
    driver.removed_ids.append(10**6)
    driver.runner.submit(Plan(removed_ids=driver.removed_ids)).result()
    with pytest.raises(RuntimeError, match="more requests run than there are slots"):
        driver.step([driver.entry(driver.request(PROMPT)) for _ in range(3)])


def test_wholly_resident_prompt_samples_its_last_token_and_writes_nothing(tiny: LoadedModel) -> None:
    driver = Driver(make_runner(tiny))
    first = driver.request(PROMPT[:32])
    [expected] = driver.generate([first], 6)
    shared = first.block_ids[:2]
    driver.runner._kv[shared] *= 1 + 2**-20  # no token changes by it, but writing the same KV again would show
    before = driver.runner._kv[shared].clone()
    second = driver.request(PROMPT[:32])
    second.block_ids, second.num_resident_tokens, second.num_computed_tokens = [*shared], 32, 31
    assert driver.generate([second], 6) == [expected]
    torch.testing.assert_close(driver.runner._kv[shared], before, rtol=0, atol=0)


def test_block_that_was_exchanged_is_read_where_it_is_now(tiny: LoadedModel) -> None:
    """Dedupe on commit points a running request at another block of the same tokens."""
    driver = Driver(make_runner(tiny))
    first, second = driver.request(PROMPT[:40]), driver.request(PROMPT[:40])
    expected, _ = driver.generate([first, driver.request(PROMPT[:9])], 10)
    driver.step([driver.entry(second)])
    driver.runner._kv[second.block_ids[1]] = float("nan")
    second.block_ids[1] = first.block_ids[1]
    second.first_changed_block = 1
    assert driver.generate([second], 10) == [expected]
    assert second.first_changed_block == len(second.block_ids)


def test_step_in_which_nobody_samples_gives_no_tokens(tiny: LoadedModel) -> None:
    driver = Driver(make_runner(tiny))
    assert driver.step([driver.entry(driver.request(PROMPT), 5)]) == SampledTokens([None])


def test_logits_that_are_no_numbers_fail_their_request_alone(tmp_path: Path) -> None:
    """D18: a weight that is NaN, met by one token only."""
    model = make_tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = float("nan")
    model.save_pretrained(tmp_path)
    driver = Driver(make_runner(load(tmp_path)))
    good, bad, random_bad = (
        driver.request(PROMPT[:20]),
        driver.request([*PROMPT[:18], 96]),
        driver.request([96], SamplingParams(temperature=1.0, top_p=0.9, top_k=5)),
    )
    [expected] = driver.generate([driver.request(PROMPT[:20])], 1)
    entries = [driver.entry(request) for request in (bad, good, random_bad)]
    sampled = driver.runner.submit(Plan(entries)).result()
    assert sampled.token_ids == [None, expected[0], None]
    assert list(sampled.errors) == [0, 2]
    assert all("not finite numbers" in error.message for error in sampled.errors.values())


def test_num_threads_is_what_torch_runs_with(tiny: LoadedModel) -> None:
    before = torch.get_num_threads()
    try:
        make_runner(tiny, num_threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
