"""Many at once, and clients that leave: nothing is left behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kvern.client import Client, Delta
from tests.e2e.generation import assert_serves, collect
from tests.up_process import UpProcess


def test_crowd_of_64_calls_all_finish_and_free_every_block(running_set: UpProcess, client: Client) -> None:
    prompts = [[1000 + index] * (8 + index) for index in range(64)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        generations = list(threads.map(lambda ids: collect(client.generate(ids, max_tokens=8)), prompts))
    assert all(0 < generation.finished.usage.completion_tokens <= 8 for generation in generations)
    running_set.wait_idle()


def test_cancelled_call_frees_its_blocks(running_set: UpProcess, client: Client) -> None:
    """E01."""
    _leave_after_deltas(client, 5)
    running_set.wait_idle()


def test_clients_gone_mid_stream_free_every_block_and_the_next_is_served(running_set: UpProcess) -> None:
    """E02."""
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(_connect_and_leave, [running_set.listen] * 20))
    running_set.wait_idle()
    with Client(running_set.listen) as client:
        assert_serves(client)


def _connect_and_leave(address: str) -> None:
    with Client(address) as client:
        _leave_after_deltas(client, 2)


def _leave_after_deltas(client: Client, number: int) -> None:
    events = client.generate("Once upon a time", max_tokens=400, temperature=0)
    for event in events:
        number -= isinstance(event, Delta)
        if number == 0:
            return
    raise AssertionError("the stream ended before the client left")
