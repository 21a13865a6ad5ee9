"""The benchmark grows conversations as it says, and counts what it finds."""

from __future__ import annotations

import random

from prediction import MAX_PROMPT_TOKENS, Conversation, Outcome, summarize


def test_conversation_goes_on_from_its_answers_and_begins_anew_when_long() -> None:
    conversation, rng = Conversation(system=[1, 2, 3]), random.Random(0)
    before: list[int] = []
    for _ in range(50):
        conversation.ask(97, rng)
        prompt = conversation.token_ids
        assert len(prompt) <= MAX_PROMPT_TOKENS
        assert prompt[: conversation.asked_before] == before[: conversation.asked_before]
        assert conversation.asked_before in (0, len(before))
        assert prompt[:3] == [1, 2, 3]
        before = list(prompt)


def test_summary_counts_exact_and_wrong_predictions_apart() -> None:
    outcomes = [
        Outcome("a", prompt_tokens=100, predicted=64, cached=64, asked_before=70),
        Outcome("b", prompt_tokens=100, predicted=64, cached=48, asked_before=70),
        Outcome("a", prompt_tokens=100, predicted=0, cached=16, asked_before=0),
    ]
    summary = summarize(outcomes, block_size=16)
    assert (summary.requests, summary.predicted_exactly) == (3, 1)
    assert (summary.predicted_more, summary.predicted_less, summary.num_forgotten) == (1, 1, 1)
    assert summary.hit_rate == 128 / 300
    assert summary.requests_by_replica == {"a": 2, "b": 1}
