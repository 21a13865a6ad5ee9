"""Where a set keeps its sockets and logs. One set per client port, held by a lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

_MAX_FOLDER_BYTES = 70
"""A socket path holds about 100 bytes; the rest is for the names in the folder."""

_DYING_S = 30.0
"""How long the processes of a set whose supervisor was killed are given to be gone."""


class SetRunning(Exception):
    """Another set has the port."""


class FolderError(Exception):
    """No folder is fit for sockets. The message says why."""


def log_folder(port: int) -> Path:
    """Return the folder of a set's logs, one file a process. It may not exist."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "kvern" / str(port)


def run_folder(port: int) -> Path:
    """Return the folder of a set's sockets, in a private one. It may not exist. Raises FolderError."""
    return _runtime_root() / str(port)


def _runtime_root() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK) and len(os.fsencode(runtime)) < _MAX_FOLDER_BYTES:
        return _private(Path(runtime) / "kvern")
    return _private(Path("/tmp") / f"kvern-{os.getuid()}")


def _private(folder: Path) -> Path:
    """Make a folder that only this user can enter: who can enter it can talk to the services."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise FolderError(f"{folder} is open to others or not a folder of yours; remove it")
    return folder


class SetLock:
    """The claim to a port, in two locks: the supervisor's own, and one that its child processes inherit.

    The second is free only once the last child is gone, however they and their supervisor ended.
    """

    def __init__(self, folder: Path, patience_s: float = _DYING_S) -> None:
        """Take it, waiting `patience_s` for what is left of an earlier set to be gone. Raises SetRunning."""
        self._folder = folder
        folder.mkdir(exist_ok=True)
        with ExitStack() as opened:
            self._supervisor = opened.enter_context(open(folder / "up.lock", "a+"))
            self._children = opened.enter_context(open(folder / "children.lock", "a"))
            self._take_from_supervisor()
            self._take_from_children(patience_s)
            self._files = opened.pop_all()
        for stale in folder.glob("*.sock*"):
            stale.unlink()

    @property
    def inherited_fd(self) -> int:
        """The file descriptor that each child process must hold."""
        return self._children.fileno()

    def release(self, *, forget: bool) -> None:
        """Give it up. `forget` removes the folder: nobody will ask for this port again."""
        if forget:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._files.close()

    def _take_from_supervisor(self) -> None:
        if not _lock(self._supervisor):
            self._supervisor.seek(0)
            raise SetRunning(f"Kvern is already up on port {self._folder.name} (process {self._supervisor.read()})")
        self._supervisor.truncate(0)
        self._supervisor.write(str(os.getpid()))
        self._supervisor.flush()

    def _take_from_children(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while not _lock(self._children):
            if time.monotonic() > deadline:
                raise SetRunning(f"processes of an earlier Kvern on port {self._folder.name} still run")
            time.sleep(0.02)


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
