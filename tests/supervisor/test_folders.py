"""One set per port, private folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvern.supervisor.folders import FolderError, SetLock, SetRunning, run_folder


def test_second_claim_names_the_holder(tmp_path: Path) -> None:
    lock = SetLock(tmp_path)
    with pytest.raises(SetRunning, match=f"process {os.getpid()}"):
        SetLock(tmp_path)
    lock.release(forget=False)
    SetLock(tmp_path).release(forget=False)


def test_claim_waits_until_the_last_child_of_a_dead_supervisor_is_gone(tmp_path: Path) -> None:
    lock = SetLock(tmp_path)
    sleeper = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(sleeper, pass_fds=[lock.inherited_fd], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        lock.release(forget=False)
        with pytest.raises(SetRunning, match="earlier"):
            SetLock(tmp_path, patience_s=0)
        child.send_signal(signal.SIGKILL)
        SetLock(tmp_path).release(forget=False)


def test_claim_removes_stale_sockets(tmp_path: Path) -> None:
    (tmp_path / "engine-0.sock").touch()
    SetLock(tmp_path).release(forget=False)
    assert not list(tmp_path.glob("*.sock"))


def test_forgotten_claim_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "50051"
    SetLock(folder).release(forget=True)
    assert not folder.exists()


def test_run_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = run_folder(50051)
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    folder.parent.chmod(0o755)
    with pytest.raises(FolderError, match="open to others"):
        run_folder(50051)


def test_run_folder_too_deep_for_a_socket_is_left_for_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert len(os.fsencode(run_folder(50051))) < 70
