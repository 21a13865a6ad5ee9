"""What reads a tool call, and what the calls of one answer share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from kvern.services.gateway.parsing.json_scanner import Status
from kvern.services.gateway.parsing.markers import Lead
from kvern.services.gateway.parsing.pieces import Content, Piece, ToolCallArguments, ToolCallBegins

MAX_HELD = 16_384
"""Characters held back while they may yet become a call: the head of a call, or arguments that precede the name."""


class Calls:
    """The calls of one answer."""

    def __init__(self, tools: Collection[str]) -> None:
        self.tools = frozenset(tools)
        self.num_begun = 0

    def begin(self, name: str, out: list[Piece]) -> None:
        """Begin the next call."""
        out.append(ToolCallBegins(self.num_begun, name))
        self.num_begun += 1

    def add_arguments(self, text: str, out: list[Piece]) -> None:
        """Go on with the call that began last."""
        out.append(ToolCallArguments(self.num_begun - 1, text))


class CallReader(Protocol):
    """Reads what one opening marker opens: a call, or several. How far it reads depends on the text, not its pieces."""

    status: Status
    held: str
    """Text read and neither given out nor known to be a call's. When the reader is BROKEN, it is content."""

    def read(self, text: str, position: int, out: list[Piece]) -> int:
        """Read on from `position`; return where the reader is complete or broken, or the text's end."""
        ...

    def cut_off(self) -> str:
        """Return what of `held` is content, now that no text follows."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls."""

    opening: str
    closing: str
    """What may follow a call and belongs to it."""
    reader: Callable[[Calls, str], CallReader]
    """Makes a reader. Takes the text that the reader is to give back if it finds no call: the marker, to begin with."""
    is_bare: bool = False
    """Whether a call may be the answer's first text, without the marker."""


class CallMode:
    """Part of an answer that a reader reads."""

    def __init__(self, reader: CallReader, closing: str) -> None:
        self._reader = reader
        self._closing = closing

    @property
    def lead(self) -> Lead | None:
        """What to pass over after this part."""
        return Lead(self._closing) if self._reader.status is Status.COMPLETE else None

    def push(self, text: str, out: list[Piece]) -> str | None:
        """Return None as long as this part goes on, then the text after it."""
        reader, position = self._reader, 0
        while position < len(text) and reader.status is Status.OPEN:
            room = MAX_HELD - len(reader.held)
            if room == 0:
                reader.status = Status.BROKEN
            else:
                position += reader.read(text[position : position + room], 0, out)
        if reader.status is Status.OPEN:
            return None
        if reader.status is Status.BROKEN and reader.held:
            out.append(Content(reader.held))
        return text[position:]

    def finish(self, out: list[Piece]) -> None:
        """Take it that no text follows."""
        text = self._reader.cut_off()
        if text:
            out.append(Content(text))
