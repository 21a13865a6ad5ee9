"""What a file says, read beside the event loop when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from kvern.services.runtime.reloading import Reloaded, UnusableFile, read_bytes

CHECK_INTERVAL_S = 0.5
MAX_FILE_BYTES = 16 * 1024 * 1024

_Value = TypeVar("_Value")
_Model = TypeVar("_Model", bound=BaseModel)


class ReloadedFile(Generic[_Value]):
    """What is made of a file that may be large. `watch` keeps it up to date; while a new file is broken, the last one
    stays.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], _Value]) -> None:
        """parse: raises ValueError for what is broken. Raises UnusableFile where there is nothing to begin with."""
        self._reloaded = Reloaded([path], lambda: _load(path, parse))
        self.value = self._reloaded.get()

    async def watch(self) -> None:
        """Look for changes for ever."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.value = await asyncio.to_thread(self._reloaded.get)


def _load(path: Path, parse: Callable[[bytes], _Value]) -> _Value:
    data = read_bytes(path)
    if len(data) > MAX_FILE_BYTES:
        raise UnusableFile(f"{path}: has more than {MAX_FILE_BYTES} bytes")
    try:
        return parse(data)
    except ValueError as error:
        raise UnusableFile(f"{path}: {error}") from error


def parse_yaml(data: bytes, kind: type[_Model]) -> _Model:
    """Return what a YAML file describes. Raises ValueError that names the entry at fault, and not what it holds."""
    try:
        return kind.model_validate(yaml.load(data, Loader=yaml.CSafeLoader) or {})
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError("not YAML" if mark is None else f"not YAML, line {mark.line + 1}") from error
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, each['loc'])) or 'file'}: {each['msg']}" for each in error.errors()[:5])
        raise ValueError("; ".join(faults)) from error
