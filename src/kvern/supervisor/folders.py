"""Where a set keeps its sockets and logs. One set per client port, held by a lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import IO

_MAX_FOLDER_BYTES = 70
"""A socket path holds about 100 bytes; the rest is for the names in the folder."""

_DYING_S = 10.0
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
    """Return the private folder of a set's sockets, made if need be. Raises FolderError."""
    folder = _runtime_root() / str(port)
    folder.mkdir(exist_ok=True)
    return folder


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
    """The claim to a port, shared with every process of the set: it is free only once the last of them is gone."""

    def __init__(self, folder: Path) -> None:
        """Take it. Raises SetRunning, naming the process that has it."""
        self._folder = folder
        self._file = open(folder / "up.lock", "a+")  # noqa: SIM115 (held until the set ends)
        try:
            self._acquire()
        except SetRunning:
            self._file.close()
            raise
        self._write_pid()

    @property
    def file(self) -> IO[str]:
        return self._file

    def _acquire(self) -> None:
        deadline = time.monotonic() + _DYING_S
        while not self._try_lock():
            pid = self._holder()
            if _alive(pid):
                raise SetRunning(f"Kvern is already up on port {self._folder.name} (process {pid})")
            if time.monotonic() > deadline:
                raise SetRunning(f"processes of an earlier Kvern on port {self._folder.name} still run")
            time.sleep(0.02)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holder(self) -> int:
        self._file.seek(0)
        text = self._file.read()
        return int(text) if text.isdecimal() else 0

    def _write_pid(self) -> None:
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self, *, forget: bool) -> None:
        """Give it up. `forget` removes the folder, for a port that nobody asked for by number."""
        if forget:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._file.close()


def _alive(pid: int) -> bool:
    # 0: the holder has not written its number yet, so it has only just begun.
    if pid == 0:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
