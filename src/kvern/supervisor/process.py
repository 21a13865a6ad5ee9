"""One child process that is kept alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvern.supervisor.readiness import Probe

_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 10.0
_STEADY_S = 30.0
"""A process that lived this long did not die of how it was started."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a process is."""

    name: str
    """Unique in the set, say `engine-0`."""

    module: str
    """What Python is to run. It takes a flag --supervisor-pid."""

    flags: Sequence[str]
    environ: Mapping[str, str]
    probe: Probe


class ChildProcess:
    """A service as a child process, started again after each end, with growing delays."""

    def __init__(self, spec: ProcessSpec, log_path: Path, inherited_fd: int) -> None:
        self.name = spec.name
        self.log_path = log_path
        self.ready = False
        """Whether its probe has succeeded since it was last started."""
        self._spec = spec
        self._inherited_fd = inherited_fd
        self._popen: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._delay_s = _FIRST_DELAY_S
        self._restart_at = 0.0

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def restart_due(self) -> bool:
        return time.monotonic() >= self._restart_at

    def start(self) -> None:
        """Start it. The kernel ends it with the thread that calls this, so that must be one that lives on."""
        # -P: a folder named as a library, where the person happens to stand, must not take its place.
        command = [sys.executable, "-P", "-m", self._spec.module, *self._spec.flags]
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                [*command, f"--supervisor-pid={os.getpid()}"],
                env=dict(self._spec.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._inherited_fd],
                # Ctrl-C in the terminal is for the supervisor, which ends its children in order.
                process_group=0,
            )
        self._started_at = time.monotonic()
        self.ready = False

    def probe(self) -> bool:
        """Ask whether it is ready; remembered in `ready`."""
        self.ready = self._spec.probe.ready()
        return self.ready

    def reap(self) -> tuple[str, float] | None:
        """Return how it ended and after what delay it may start again, or None while it runs or after it was told."""
        if self._popen is None or self._popen.poll() is None:
            return None
        cause = _cause(self._popen.returncode)
        now = time.monotonic()
        if now - self._started_at > _STEADY_S:
            self._delay_s = _FIRST_DELAY_S
        delay_s = self._delay_s
        self._restart_at = now + delay_s
        self._delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        self._popen = None
        self.ready = False
        return cause, delay_s

    def terminate(self) -> None:
        if self._popen is not None:
            self._popen.terminate()

    def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()


def _cause(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    name = signal.Signals(-returncode).name
    memory = "; the machine may be out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{memory}"
