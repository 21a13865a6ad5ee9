"""What an answer's text turns out to be, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegins:
    """A call of an offered tool. Calls of an answer are counted from 0; no two are open at once."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next part of a call's arguments. The parts of a call that was not cut off make one valid JSON object."""

    index: int
    text: str


Piece = Content | Reasoning | ToolCallBegins | ToolCallArguments


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with neighbours of one kind made one."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        match last, piece:
            case (Content(before), Content(text)):
                result[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                result[-1] = Reasoning(before + text)
            case (ToolCallArguments(index, before), ToolCallArguments(other, text)) if index == other:
                result[-1] = ToolCallArguments(index, before + text)
            case _:
                result.append(piece)
    return result
