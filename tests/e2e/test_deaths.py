"""Processes die; the set goes on, or leaves nothing."""

from __future__ import annotations

import signal
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvern.client import Client, Delta
from tests.e2e.generation import assert_serves, collect
from tests.up_process import PATIENCE_S, UpProcess, is_gone, wait_until

from .fleet import BUDGET


@pytest.mark.parametrize("name", ["tokenizer", "engine-0", "detokenizer-0", "router", "gateway"])
def test_killed_process_is_restarted_and_the_next_request_succeeds(running_set: UpProcess, name: str) -> None:
    running_set.kill(name)
    with Client(running_set.listen) as client:
        assert_serves(client)
    with urllib.request.urlopen(f"http://{running_set.http}/v1/models") as response:
        assert response.status == 200


def test_killed_supervisor_leaves_no_process_and_the_next_up_starts(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("killed")
    flags = ("--max-model-len=256", "--num-blocks=64", "--num-threads=1", BUDGET)
    with UpProcess(folder, "--replicas=2", *flags) as first:
        first.wait_ready()
        _assert_both_replicas_serve(first)
        _assert_prompts_go_where_they_are_cached(first)
        pids = first.children()
        assert set(pids) == {
            "redis", "tokenizer", "engine-0", "engine-1", "detokenizer-0", "detokenizer-1", "router", "gateway"
        }  # fmt: skip
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        with UpProcess(folder, *flags, listen=first.listen, http=first.http) as second:
            second.wait_ready()
            assert all(is_gone(pid) for pid in pids.values())
            _assert_drain_lets_a_stream_finish(second)
        assert second.process.returncode == 0, second.output


def test_supervisor_killed_while_it_starts_leaves_no_process(tmp_path: Path) -> None:
    with UpProcess(tmp_path) as up:
        wait_until(lambda: len(up.children()) == 5, "all services are started")
        pids = up.children().values()
        up.process.send_signal(signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in pids), "no service is left")


def _assert_drain_lets_a_stream_finish(up: UpProcess) -> None:
    pids = up.children().values()
    with Client(up.listen) as client:
        stream = client.generate("Once upon a time", max_tokens=32, temperature=0)
        next(stream)
        up.process.send_signal(signal.SIGTERM)
        assert collect(stream).finished.usage.completion_tokens == 32
    up.process.wait(PATIENCE_S)
    assert all(is_gone(pid) for pid in pids)


def _assert_both_replicas_serve(up: UpProcess) -> None:
    with Client(up.listen) as client, ExitStack() as stack:
        calls = [client.generate("Once upon a time", temperature=0, ignore_eos=True) for _ in range(2)]
        streams = list(map(stack.enter_context, calls))
        for stream in streams:
            next(stream)
        wait_until(lambda: up.load(0).num_running == up.load(1).num_running == 1, "each replica runs one request")
        assert all(any(isinstance(event, Delta) and event.text for event in stream) for stream in streams)


def _assert_prompts_go_where_they_are_cached(up: UpProcess) -> None:
    """By what the index says, for the router has seen none of them. Without the index it serves all the same."""
    prompts = [[1000 + number] * 100 for number in range(4)]
    assert _cached_tokens(up, prompts) == [0] * 4
    up.kill("router")
    with Client(up.listen) as client:
        wait_until(lambda: all(each.registered for each in client.list_replicas().replicas), "both are registered")
    assert _cached_tokens(up, prompts) == [96] * 4
    up.kill("redis")
    assert _cached_tokens(up, [[2000]]) == [0]


def _cached_tokens(up: UpProcess, prompts: list[list[int]]) -> list[int]:
    with Client(up.listen) as client:
        generations = [collect(client.generate(prompt, max_tokens=1)) for prompt in prompts]
    return [generation.finished.usage.cached_tokens for generation in generations]
