"""What a request's next token must be, computed plainly: one row, one token at a time, in the documented order."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from kvern.engine.request import Request
from kvern.kernels.philox import reference as philox_reference

_OUT = np.float32("-inf")


def next_token(
    logits: Sequence[float], request: Request, eos_token_ids: Collection[int], grammar: Collection[int] | None = None
) -> int | None:
    """Return the token, None where none may be sampled. grammar: the tokens it allows."""
    scores = edit(logits, request, eos_token_ids, grammar)
    if max(scores) == _OUT:
        return None
    sampling = request.sampling
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if sampling.is_greedy:
        return order[0]
    return draw(
        [float(score) for score in scores],
        order,
        temperature=sampling.temperature,
        min_p=sampling.min_p,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        position=request.num_output_tokens,
    )


def edit(
    logits: Sequence[float], request: Request, eos_token_ids: Collection[int], grammar: Collection[int] | None = None
) -> list[np.float32]:
    """Return the logits after biases, masks and penalties."""
    sampling = request.sampling
    scores = [np.float32(logit) for logit in logits]
    for token, bias in sampling.logit_bias.items():
        scores[token] += np.float32(bias)
    for allowed in (sampling.allowed_token_ids, grammar):
        if allowed:
            scores = [score if token in allowed else _OUT for token, score in enumerate(scores)]
    for word in sampling.bad_words:
        if ([_OUT] * len(word) + request.token_ids)[len(request.token_ids) + 1 :] == list(word[:-1]):
            scores[word[-1]] = _OUT
    scores = without_ends(scores, request, eos_token_ids)
    return [penalized(score, token, request) for token, score in enumerate(scores)]


def without_ends(scores: list[np.float32], request: Request, eos_token_ids: Collection[int]) -> list[np.float32]:
    stopping = request.stopping
    ends = set(stopping.stop_token_ids) | (set() if stopping.ignore_eos else set(eos_token_ids))
    if request.num_output_tokens >= stopping.min_tokens:
        return scores
    rest = [_OUT if token in ends else score for token, score in enumerate(scores)]
    return scores if max(rest) == _OUT else rest


def penalized(score: np.float32, token: int, request: Request) -> np.float32:
    sampling, output = request.sampling, request.token_ids[request.num_prompt_tokens :]
    if score == _OUT:
        return score
    if token in request.token_ids:
        factor = np.float32(sampling.repetition_penalty)
        score = score / factor if score > 0 else score * factor
    score = score - np.float32(output.count(token)) * np.float32(sampling.frequency_penalty)
    return score - np.float32(token in output) * np.float32(sampling.presence_penalty)


def draw(
    logits: list[float],
    order: list[int],
    *,
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int,
) -> int:
    """Cut, and walk the cumulated probabilities, in Python's floats."""
    greatest = logits[order[0]]
    weight = {token: math.exp((logits[token] - greatest) / temperature) for token in order}
    kept = [token for token in order if weight[token] >= min_p][: top_k or None]
    total = sum(weight[token] for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += weight[token]
        if mass >= top_p * total:
            break
    high, low, _, _ = philox_reference.philox4x32((seed % 2**32, seed >> 32), (position, 0, 0, 0))
    target = ((high << 21) + (low >> 11)) / 2**53 * sum(weight[token] for token in nucleus)
    for token in sorted(nucleus):
        target -= weight[token]
        if target < 0:
            return token
    raise AssertionError("the number is at least the whole")
