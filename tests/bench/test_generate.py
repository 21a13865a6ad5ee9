"""The benchmark counts what it measures."""

from __future__ import annotations

import generate

from tests.up_process import UpProcess


def test_level_with_two_clients_times_every_token(running_set: UpProcess) -> None:
    vocab_size = generate.vocabulary_size(running_set.listen)
    workload = generate.Workload(prompt_tokens=20, output_tokens=5)
    level = generate.run_level(running_set.listen, 2, workload, vocab_size)
    assert level.num_requests == generate.MIN_REQUESTS
    assert round(level.output_tokens_per_s * level.total_s) == 5 * generate.MIN_REQUESTS
    assert level.first_token_ms == sorted(level.first_token_ms)
    assert 0 < level.first_token_ms[0] < level.total_s * 1000
    assert level.inter_token_ms[-1] > 0
