"""What is made of files, and made anew when the files change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import structlog

_log = structlog.get_logger("kvern.files")

_T = TypeVar("_T")


class UnusableFile(Exception):
    """A file that a setting names cannot be read, or does not hold what it should. The message names it."""


class FileVersion(NamedTuple):
    """What changes when a file is written or replaced."""

    modified_ns: int
    num_bytes: int
    inode: int


def version_of(file: str | Path) -> FileVersion | None:
    """Return a file's version, through links: Kubernetes replaces a mounted Secret by turning one. None: no file."""
    try:
        stat = Path(file).stat()
    except OSError:
        return None
    return FileVersion(stat.st_mtime_ns, stat.st_size, stat.st_ino)


def read_bytes(file: Path) -> bytes:
    """Raises UnusableFile."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UnusableFile(f"{file}: {error.strerror}") from error


class Reloaded(Generic[_T]):
    """What `load` makes of files. It is made anew when one of them has changed; while that fails, the last one stays.

    `get` looks at the files each time, which takes some microseconds a file.
    """

    def __init__(self, files: Sequence[Path], load: Callable[[], _T]) -> None:
        """load: raises UnusableFile where the files will not do, and so does this."""
        self._files = files
        self._load = load
        # Before they are read: what changes while they are is read again.
        self._versions = self._look()
        self._value = load()

    def get(self) -> _T:
        """Return what the files make now."""
        versions = self._look()
        if versions != self._versions:
            self._versions = versions
            self._reload()
        return self._value

    def _reload(self) -> None:
        try:
            self._value = self._load()
        except Exception as error:  # YAML's readers raise KeyError too; nothing in a file may end who serves
            _log.error("changed files cannot be used; what they held before stays in use", error=str(error))
        else:
            _log.info("changed files are in use", files=[str(file) for file in self._files])

    def _look(self) -> list[FileVersion | None]:
        return [version_of(file) for file in self._files]
