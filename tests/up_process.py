"""`kvern up` as its users run it, for tests."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import grpc

from kvern.client import Client
from kvern.v1.replica_pb2 import REPLICA_STATE_READY, GetReplicaInfoRequest, ReplicaLoad
from kvern.v1.replica_pb2_grpc import ReplicaServiceStub

KVERN = str(Path(sys.executable).with_name("kvern"))

MAX_MODEL_LEN = 512
NUM_BLOCKS = 256
"""Of the set that tests share: small, so that it starts fast and fills up."""

PATIENCE_S = 90.0
"""No wait that succeeds takes this long, however slow the machine; one that fails ends."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until a condition holds. Fails with `what` when it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.02)


_MAX_WORKERS = 16
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_PLACES = range(13_000 + _WORKER, 20_000, _MAX_WORKERS)
"""Ports of this worker alone, which the system gives to nobody: one may be free for long before it is used."""

_MAX_NEIGHBOURS = 8
_GROUPS = range(23_000 + _WORKER * _MAX_NEIGHBOURS, 30_000, _MAX_WORKERS * _MAX_NEIGHBOURS)
"""Where neighbouring ones begin, likewise."""

_PORTS = itertools.cycle(random.sample(_PLACES, len(_PLACES)))
_FIRST_PORTS = itertools.cycle(random.sample(_GROUPS, len(_GROUPS)))


def free_port() -> int:
    """Return a port that nobody listens on, another one each time."""
    return next(port for port in _PORTS if _are_free(range(port, port + 1)))


def first_free_port(count: int) -> int:
    """Return the first of as many neighbouring ports that nobody listens on, others each time. count: at most 8."""
    return next(first for first in _FIRST_PORTS if _are_free(range(first, first + count)))


def _are_free(ports: range) -> bool:
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        return True
    return False


def run_kvern(
    *arguments: str, environ: Mapping[str, str] = {}, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end and return what it printed."""
    return subprocess.run(
        [KVERN, *arguments],
        env={**os.environ, **environ},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


class UpProcess:
    """A set in folders of its own. Leaving the block ends it, however it stands."""

    def __init__(self, folder: Path, *flags: str, listen: str = "", http: str = "") -> None:
        self.listen = listen or f"127.0.0.1:{free_port()}"
        self.http = http or f"127.0.0.1:{free_port()}"
        self.environ = {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder / "state")}
        self.sockets = folder / "kvern" / self.listen.rpartition(":")[2]
        self._output = folder / f"up-{time.monotonic_ns()}.txt"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [KVERN, "up", "--listen", self.listen, "--http", self.http, *flags],
                env={**os.environ, **self.environ},
                stdout=output,
                stderr=output,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_ready(self) -> None:
        wait_until(lambda: "Kvern is ready" in self.output or self.process.poll() is not None, "ready or ended")
        assert self.process.poll() is None, self.output

    def children(self) -> dict[str, int]:
        """Return the pids of the services by name, as `kvern up` names them."""
        children = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ProcessLookupError):
                name = _service_name((process / "cmdline").read_text(errors="replace"))
                if name and _parent(process) == self.process.pid:
                    children[name] = int(process.name)
        return children

    def kill(self, name: str) -> None:
        """Kill a service with SIGKILL, and wait until `kvern up` says that its successor is ready."""
        already_said = self.output.count(f"{name} is ready")
        os.kill(self.children()[name], signal.SIGKILL)
        wait_until(lambda: self.output.count(f"{name} is ready") > already_said, f"{name} is ready again")
        with Client(self.listen) as client:
            wait_all_ready(client)

    def load(self, index: int = 0) -> ReplicaLoad:
        """Return a replica's load, from the replica itself."""
        with grpc.insecure_channel(f"unix:{self.sockets}/detokenizer-{index}.sock") as channel:
            return ReplicaServiceStub(channel).GetReplicaInfo(GetReplicaInfoRequest()).load

    def wait_idle(self) -> None:
        """Wait until no request is left and every block is free."""
        idle = ReplicaLoad()
        wait_until(lambda: self.load() == idle, "no request, no stream, no block in use")


def _service_name(cmdline: str) -> str:
    module = re.search(r"kvern\.services\.(\w+)", cmdline)
    socket_name = re.search(r"--listen=unix:[^\0,]*/([\w-]+)\.sock", cmdline)
    if module is None:
        return "redis" if "redis-server" in cmdline or "private_redis" in cmdline else ""
    return socket_name[1] if socket_name else module[1]


def _parent(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def is_gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have asked for its exit code yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def wait_all_ready(client: Client) -> None:
    """Wait until the router that a client talks to sees all its replicas ready."""
    wait_until(lambda: _all_ready(client), "the router sees its replicas ready")


def _all_ready(client: Client) -> bool:
    replicas = client.list_replicas().replicas
    return all(replica.reachable and replica.state == REPLICA_STATE_READY for replica in replicas)
