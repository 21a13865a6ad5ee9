"""The stage of `make gpu-check` that asks whether a small model gives the same tokens however it is run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_check_finding import Finding
from gpu_check_model import RunningEngine, llama_shape, make_request, random_model

from kvern.engine.model.loader import LoadedModel
from kvern.engine.request import Request, SamplingParams

SHAPE = llama_shape(
    num_layers=2,
    hidden_size=128,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=1024,
)
_SPREAD = 0.15
"""Of the weights, large enough that the most likely token stands out."""

_PROMPT_LENS = (5, 33, 64, 150)
_NUM_TOKENS = 24
_BASE: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "block_size": 16,
    "num_blocks": 256,
    "enable_prefix_caching": False,
}
_FEW_BLOCKS = 20
"""Enough for all prompts, and not for what comes of them."""


@dataclass(slots=True)
class Outcome:
    """What a run gave."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    """By request."""
    num_preemptions: int = 0
    num_cached: int = 0
    """Prompt tokens that were reused."""
    num_graphs: int = 0


def compare_engines(device: str, known: dict[str, float]) -> Iterator[Finding]:
    """In float32, where a request's tokens depend on nothing but itself, up to ties."""
    model = random_model(SHAPE, torch.float32, torch.device(device), _SPREAD)
    requests = make_requests()
    alone = run_apart(model, requests)
    yield _compare("in company", run_together(model, requests), alone)
    yield _compare("in chunks", run_together(model, requests, max_num_batched_tokens=16), alone)
    eager = run_together(model, requests, enforce_eager=True)
    yield _compare("without CUDA graphs", eager, alone, happened=alone.num_graphs if device != "cpu" else 1)
    yield _compare("with torch's attention", run_together(model, requests, attention_backend="torch"), alone)
    preempted = run_together(model, requests, num_blocks=_FEW_BLOCKS, max_model_len=_FEW_BLOCKS * 16)
    yield _compare("preempted", preempted, alone, happened=preempted.num_preemptions)
    cached = run_twice(model, requests)
    yield _compare("from the prefix cache", cached, alone, happened=cached.num_cached)


def start(device: str) -> None:
    """Start an engine and end it, for what it compiles."""
    RunningEngine(random_model(SHAPE, torch.float32, torch.device(device), _SPREAD), **_BASE).close()


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of some lengths, half of them greedy."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for number, length in enumerate(_PROMPT_LENS):
        prompt = torch.randint(SHAPE.vocab_size, (length,), generator=generator).tolist()
        sampling = SamplingParams(temperature=0.0 if number % 2 else 0.8, top_p=0.95, top_k=50, seed=number)
        requests.append((prompt, sampling))
    return requests


def run_together(model: LoadedModel, requests: list[tuple[list[int], SamplingParams]], **options: Any) -> Outcome:
    """Run requests at the same time. options: of EngineConfig."""
    outcome = Outcome()
    engine = RunningEngine(model, **(_BASE | options))
    _run(engine, _numbered(requests, 0), outcome)
    engine.close()
    return outcome


def run_apart(model: LoadedModel, requests: list[tuple[list[int], SamplingParams]]) -> Outcome:
    """Run requests one after another."""
    outcome = Outcome()
    engine = RunningEngine(model, **_BASE)
    outcome.num_graphs = engine.capacity.num_graphs
    for request in _numbered(requests, 0):
        _run(engine, [request], outcome)
    engine.close()
    return outcome


def run_twice(model: LoadedModel, requests: list[tuple[list[int], SamplingParams]]) -> Outcome:
    """Run requests, and then again with what the cache holds. Returns the second run."""
    outcome = Outcome()
    engine = RunningEngine(model, **(_BASE | {"enable_prefix_caching": True}))
    _run(engine, _numbered(requests, len(requests)), Outcome())
    _run(engine, _numbered(requests, 0), outcome)
    engine.close()
    return outcome


def _numbered(requests: list[tuple[list[int], SamplingParams]], first: int) -> list[Request]:
    return [
        make_request(number, prompt, _NUM_TOKENS, sampling)
        for number, (prompt, sampling) in enumerate(requests, start=first)
    ]


def _run(engine: RunningEngine, requests: list[Request], outcome: Outcome) -> None:
    """Wait until all requests have ended."""
    outcome.tokens |= {request.request_id: [] for request in requests}
    engine.add(*requests)
    num_left = len(requests)
    for result in engine.results():
        for request_id, token_id in zip(result.request_ids, result.token_ids, strict=True):
            outcome.tokens[request_id].append(token_id)
        outcome.num_cached += sum(each.cached_tokens for each in result.scheduled)
        outcome.num_preemptions += sum(ended.preemptions for ended in result.ended)
        num_left -= len(result.ended)
        if not num_left:
            return


def _compare(how: str, outcome: Outcome, alone: Outcome, *, happened: int = 1) -> Finding:
    """happened: 0 where what the run is for did not take place."""
    name = f"the same tokens {how}"
    if not happened:
        return Finding(name, error="the engine did not run that way")
    differing = [number for number, tokens in alone.tokens.items() if outcome.tokens[number] != tokens]
    if differing:
        number = differing[0]
        return Finding(
            name, error=f"{len(differing)} requests differ: {outcome.tokens[number]} for {alone.tokens[number]}"
        )
    return Finding(name)
