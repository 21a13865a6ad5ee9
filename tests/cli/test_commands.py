"""The commands that talk to a running Kvern."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import pytest

from tests.up_process import KVERN, NUM_BLOCKS, UpProcess, free_port, run_kvern

QUESTION = "What is the capital of France?"
GREEDY = ("--temperature", "0", "--max-tokens", "8")


@pytest.fixture
def server(running_set: UpProcess, monkeypatch: pytest.MonkeyPatch) -> UpProcess:
    """The running set, where commands look for it."""
    monkeypatch.setenv("KVERN_SERVER", running_set.listen)
    for name, value in running_set.environ.items():
        monkeypatch.setenv(name, value)
    return running_set


def _json_lines(*arguments: str) -> list[dict[str, Any]]:
    done = run_kvern(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.usefixtures("server")
def test_chat_prints_only_the_answer_on_stdout() -> None:
    done = run_kvern("chat", QUESTION, *GREEDY, "--stats")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert "tok/s" in done.stderr
    assert "tok/s" not in done.stdout


@pytest.mark.usefixtures("server")
def test_chat_without_prompt_remembers_what_was_said() -> None:
    done = run_kvern("chat", *GREEDY, "--stats", stdin=f"{QUESTION}\n\nRepeat that, please.\n")
    first, second = (int(line.split()[0]) for line in done.stderr.splitlines())
    assert done.returncode == 0
    assert second > first + len(QUESTION.split())


@pytest.mark.usefixtures("server")
def test_generate_json_prints_each_event_as_a_line() -> None:
    events = _json_lines("generate", "The mill", *GREEDY, "--seed", "7", "--stop", "\n\n\n")
    assert list(events[0]) == ["started"]
    assert events[0]["started"]["model"] == "smollm2"
    assert events[0]["started"]["seed"] == "7"
    assert list(events[-1]) == ["finished"]
    assert "".join(event["delta"]["text"] for event in events if "delta" in event)


@pytest.mark.usefixtures("server")
def test_generate_that_the_server_refuses_fails_with_one_line() -> None:
    done = run_kvern("generate", "The mill", "--temperature", "-1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: INVALID_ARGUMENT: sampling.temperature:")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "chat", "tokenize", "route"])
def test_text_that_is_not_unicode_fails_with_one_line(command: str) -> None:
    """B11."""
    done = run_kvern(command, "a byte: \udcff")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: INVALID_ARGUMENT: ")
    assert done.stderr.count("\n") == 1


def test_interrupted_generation_exits_with_130_and_is_cancelled(server: UpProcess) -> None:
    command = [KVERN, "generate", "Once upon a time", "--temperature", "0", "--max-tokens", "450"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    server.wait_idle()


@pytest.mark.usefixtures("server")
def test_tokenize_prints_ids() -> None:
    ids = run_kvern("tokenize", "The mill turns.").stdout.split()
    assert [str(number) for number in _json_lines("tokenize", "The mill turns.")[0]["ids"]] == ids
    assert len(ids) == 4


@pytest.mark.usefixtures("server")
def test_route_shows_where_a_text_would_go() -> None:
    (routed,) = _json_lines("route", "The mill turns.", "--session", "s")
    (candidate,) = routed["candidates"]
    assert (routed["prompt_tokens"], routed["replica"]) == (4, candidate["replica"])
    assert candidate["cost"] >= 4 - candidate["matched_tokens"]
    assert candidate["replica"] in run_kvern("route", "The mill turns.").stdout


@pytest.mark.usefixtures("server")
def test_models_lists_the_served_one() -> None:
    (listed,) = _json_lines("models")
    assert [(model["name"], model["ready_replicas"]) for model in listed["models"]] == [("smollm2", 1)]
    assert "smollm2" in run_kvern("models").stdout


@pytest.mark.usefixtures("server")
def test_status_shows_replicas_and_their_blocks() -> None:
    (listed,) = _json_lines("status")
    (replica,) = listed["replicas"]
    assert replica["state"] == "REPLICA_STATE_READY"
    assert (replica["listed"], replica["registered"], replica["id"]) == (True, False, replica["address"])
    assert replica["engine"]["num_blocks"] == NUM_BLOCKS
    shown = run_kvern("status").stdout
    assert "ready" in shown
    assert f"/{NUM_BLOCKS}" in shown
    assert "list" in shown


@pytest.mark.usefixtures("server")
def test_status_watch_goes_on_until_interrupted() -> None:
    with subprocess.Popen([KVERN, "status", "--watch", "--json"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert all(json.loads(line)["replicas"] for line in lines)


@pytest.mark.usefixtures("server")
def test_logs_of_one_service_are_readable_or_json() -> None:
    readable = run_kvern("logs", "router").stdout.splitlines()
    assert readable
    assert all(line.startswith("router") for line in readable)
    as_json = run_kvern("logs", "router", "--json").stdout.splitlines()
    assert {json.loads(line)["service"] for line in as_json} == {"router"}


@pytest.mark.usefixtures("server")
def test_logs_of_unknown_service_names_the_known_ones() -> None:
    done = run_kvern("logs", "miller")
    assert done.returncode == 2
    assert "engine-0" in done.stderr


@pytest.mark.parametrize("command", [("generate", "a"), ("chat", "a"), ("tokenize", "a"), ("models",), ("status",)])
def test_command_without_server_says_how_to_start_one(command: tuple[str, ...]) -> None:
    address = f"127.0.0.1:{free_port()}"
    done = run_kvern(*command, "--server", address)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"Error: no Kvern at {address}; start one with: kvern up\n"


def test_unknown_command_exits_with_usage() -> None:
    assert run_kvern("grind").returncode == 2


def test_doctor_findings_parse() -> None:
    done = run_kvern("doctor", "--json")
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, findings
    assert {"python", "platform", "memory", "torch", "default model"} <= {finding["name"] for finding in findings}
    assert all(finding["advice"] for finding in findings if finding["status"] != "ok")
