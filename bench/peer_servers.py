"""The servers that bench/peer.py compares, each on a free port of the loopback interface, and ended after use."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from typing import IO
from urllib.error import URLError
from urllib.request import urlopen

import click
from generate import served
from peer_setup import MODEL, PYTHON, VENV

from kvern.services.runtime.model_source import DEFAULT_MODEL, find_model

START_TIMEOUT_S = 600
"""vLLM compiles when it first starts, for minutes where others use the cores too."""
STOP_TIMEOUT_S = 30


@contextmanager
def kvern(up_flags: Sequence[str]) -> Iterator[str]:
    """Start a set and yield its front door."""
    with served(str(MODEL), ["--dtype", "bfloat16", *up_flags]) as address:
        yield f"grpc://{address}"


@contextmanager
def kvern_in_4_bits() -> Iterator[str]:
    """Start a set with the weights that llama.cpp gets, and yield its front door."""
    with served(DEFAULT_MODEL, ["--dtype", "bfloat16", "--quantization", "int4"]) as address:
        yield f"grpc://{address}"


@contextmanager
def vllm() -> Iterator[str]:
    """Start vLLM's OpenAI server and yield its URL."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environ = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # By itself it leaves a core free, which of two is half.
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "LD_PRELOAD": ":".join(_preloaded()),
    }
    port = free_port()
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--dtype", "bfloat16"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log", "--enable-prefix-caching"]
    url = f"http://127.0.0.1:{port}"
    with _running("vLLM", command, environ) as process:
        _wait_for(f"{url}/health", process)
        yield url


def _preloaded() -> list[str]:
    """Return what vLLM's documentation wants loaded first, as far as it is here: measured, a fifth faster with both."""
    libraries = [*VENV.glob("lib/libiomp5.so"), find_library("tcmalloc_minimal")]
    return [str(library) for library in libraries if library is not None]


@contextmanager
def llama_cpp() -> Iterator[str]:
    """Start llama.cpp's server with the packaged GGUF, Q4_1, and yield its URL."""
    command = [str(PYTHON), str(Path(__file__).with_name("peer_llama.py")), str(find_model(DEFAULT_MODEL).path)]
    with _running("llama.cpp", command, {}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(
    name: str, command: Sequence[str], environ: Mapping[str, str], stdout: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a server. What it logs is shown where it ends by itself."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environ},
            cwd=VENV,  # Python would find our folders where it looks for its modules
            stdout=log if stdout is None else stdout,
            stderr=log,
            start_new_session=True,
            text=True,
        )
        try:
            yield process
        finally:
            failed = process.poll() is not None
            _stop(process)
            if failed:
                raise click.ClickException(f"{name} ended with status {process.returncode}:\n{_tail(log)}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "".join(log.readlines()[-20:])


def _wait_for(url: str, process: subprocess.Popen[str]) -> None:
    """Wait until a server answers, or ends, or START_TIMEOUT_S have gone by."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None:
        try:
            with urlopen(url):
                return
        except (URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise click.ClickException(f"{url} did not answer within {START_TIMEOUT_S} s") from None
        time.sleep(0.5)
    raise click.ClickException("it ended while it started")
