"""What a file says, read beside the event loop when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

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
        return kind.model_validate(_document(data))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError("not YAML" if mark is None else f"not YAML, line {mark.line + 1}") from error
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, each['loc'])) or 'file'}: {each['msg']}" for each in error.errors()[:5])
        raise ValueError("; ".join(faults)) from error


def _document(data: bytes) -> Any:
    """Return what YAML describes. Raises YAMLError, ValueError where there is nothing, as in a file that is being
    written anew in its place, or a name is given twice, of which a loader would take the last.
    """
    loader = yaml.CSafeLoader(data)
    try:
        root = loader.get_single_node()
        if root is None:
            raise ValueError("holds nothing")
        for mapping in _mappings(root):
            _check_names([key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)])
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _check_names(keys: Iterable[yaml.ScalarNode]) -> None:
    seen: set[str] = set()
    for key in keys:
        if key.value in seen:
            raise ValueError(f"line {key.start_mark.line + 1}: a name is given twice")
        seen.add(key.value)


def _mappings(root: yaml.Node) -> Iterator[yaml.MappingNode]:
    """Return all mappings below a node, each once however often it is referred to."""
    nodes, seen = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield node
            nodes.extend(part for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            nodes.extend(node.value)
