"""What `kvern up` and `kvern run` refuse before anything starts, and how they end."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.up_process import UpProcess, free_port, run_kvern


@pytest.mark.parametrize(
    ("flags", "exit_code", "said"),
    [
        (["--max-modl-len", "512"], 2, "--max-modl-len"),
        (["--max-model-len", "much"], 2, "max_model_len"),
        (["--kv-cache-memory", "-1"], 2, "kv_cache_memory"),
        (["--listen", "somewhere"], 2, "--listen"),
        (["--replicas", "0"], 2, "--replicas"),
        (["./no-such-model.gguf"], 1, "no-such-model.gguf"),
    ],
)
def test_up_with_wrong_flag_names_it(flags: list[str], exit_code: int, said: str) -> None:
    done = run_kvern("up", *flags)
    assert done.returncode == exit_code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("variable", "value"), [("KVERN_MAX_MODL_LEN", "512"), ("KVERN_LISTEN", "127.0.0.1:1")])
def test_up_with_variable_it_cannot_pass_on_names_it(variable: str, value: str) -> None:
    done = run_kvern("up", environ={variable: value})
    assert done.returncode == 2
    assert variable in done.stderr


@pytest.mark.parametrize("flag", ["--listen", "--http"])
def test_up_on_a_taken_port_names_port_and_flag(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        free = "--http" if flag == "--listen" else "--listen"
        done = run_kvern("up", flag, address, free, "127.0.0.1:0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: {flag}: port {address.rpartition(':')[2]} ")
    assert done.stderr.count("\n") == 1


def test_second_up_on_a_port_is_refused_and_the_first_goes_on(running_set: UpProcess) -> None:
    done = run_kvern("up", "--listen", running_set.listen, "--http", "127.0.0.1:0", environ=running_set.environ)
    assert done.returncode == 1
    assert f"process {running_set.process.pid}" in done.stderr
    assert running_set.process.poll() is None


def test_ready_lines_say_addresses_capacity_logs_and_a_command(running_set: UpProcess) -> None:
    said = running_set.output
    for part in (running_set.listen, running_set.http, "smollm2", "4,096 KV tokens", "kvern chat --server", "curl "):
        assert part in said
    assert Path(said.partition("logs")[2].split()[0]).is_dir()


def test_run_answers_and_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")  # a short name: in a long one there is no room for sockets
    environ = {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    flags = ("--max-model-len", "256", "--num-blocks", "32", "--num-threads", "1")
    done = run_kvern("run", "smollm2", "What is the capital of France?", *flags, environ=environ)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert not list((folder / "kvern").iterdir())
    assert not list((folder / "state" / "kvern").iterdir())


def test_interrupted_start_leaves_nothing(tmp_path: Path) -> None:
    with UpProcess(tmp_path, listen=f"127.0.0.1:{free_port()}") as up:
        while not up.children():
            assert up.process.poll() is None, up.output
    assert up.process.returncode == 0
    assert not up.children()
