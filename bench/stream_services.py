"""The processes that bench/stream.py measures: a synthetic engine, and the real services before it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.runtime.text import Tokenizer

NUM_WORDS = 64
"""Different tokens that the engine writes."""

_START_TIMEOUT_S = 120

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Services:
    """Processes by name."""

    def __init__(self, folder: Path) -> None:
        self.sent_at = folder / "sent_at"
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def address(self, name: str) -> str:
        return f"unix:{self._folder}/{name}.sock"

    def start_engine(self, tokenizer: Tokenizer) -> None:
        words = ",".join(map(str, word_ids(tokenizer)))
        program = str(Path(__file__).with_name("synthetic_engine.py"))
        self._start("engine", program, "--token-ids", words, "--sent-at", str(self.sent_at))

    def start_service(self, name: str, *flags: str) -> None:
        self._start(name, "-m", f"kvern.services.{name}", *flags, "--drain-delay-s", "0", "--drain-timeout-s", "0")

    def wait_until_serving(self, name: str) -> None:
        with grpc.insecure_channel(self.address(name)) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=_START_TIMEOUT_S, wait_for_ready=True
            )
            next(each for each in watch if each.status == health_pb2.HealthCheckResponse.SERVING)
            watch.cancel()

    def cpu_s(self, name: str) -> float:
        """Return the CPU seconds of a process so far."""
        # Fields 14 and 15, user and system time. The name, in brackets before them, may hold spaces.
        fields = self._read(name, "stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def rss_bytes(self, name: str) -> int:
        """Return a process's resident memory."""
        return int(self._read(name, "statm").split()[1]) * os.sysconf("SC_PAGESIZE")

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait()

    def _start(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            listening = [sys.executable, *command, "--listen", self.address(name)]
            self._processes[name] = subprocess.Popen(listening, stderr=log)

    def _read(self, name: str, file: str) -> str:
        return Path(f"/proc/{self._processes[name].pid}/{file}").read_text()


@contextmanager
def running(tokenizer: Tokenizer) -> Iterator[Services]:
    """Start all, wait until the router serves, stop them in the end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        services = Services(Path(folder))
        stack.callback(services.stop)
        services.start_engine(tokenizer)
        services.start_service("detokenizer", "--engine", services.address("engine"))
        services.start_service("tokenizer", "--served-model-name", "synthetic")
        peers = ["--tokenizer", services.address("tokenizer"), "--replicas", services.address("detokenizer")]
        services.start_service("router", *peers)
        services.wait_until_serving("router")
        yield services


def word_ids(tokenizer: Tokenizer) -> list[int]:
    """Return tokens that are each one word with a space before it."""
    vocab = sorted(tokenizer.backend.get_vocab().items())
    words = (id for token, id in vocab if token[0] == "Ġ" and token[1:].isascii() and token[1:].isalpha())
    return list(islice(words, NUM_WORDS))
