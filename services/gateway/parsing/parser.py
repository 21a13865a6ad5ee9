"""A choice's text, taken apart as it comes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvern.services.gateway.parsing.calls import Calls
from kvern.services.gateway.parsing.content import ContentReader, Mode
from kvern.services.gateway.parsing.hermes import HERMES
from kvern.services.gateway.parsing.llama3 import LLAMA3
from kvern.services.gateway.parsing.markers import EndTokenFilter
from kvern.services.gateway.parsing.mistral import MISTRAL
from kvern.services.gateway.parsing.pieces import Content, Piece, joined
from kvern.services.gateway.parsing.reasoning import ReasoningMode

_FORMATS = {
    "auto": (HERMES, LLAMA3, MISTRAL),
    "hermes": (HERMES,),
    "llama3": (LLAMA3,),
    "mistral": (MISTRAL,),
    "none": (),
}

TOOL_FORMATS = tuple(_FORMATS)
"""How the model writes calls; auto: in whichever of the ways the answer shows."""

REASONING_FORMATS = ("auto", "think", "none")
"""auto: reasoning begins where <think> does; think: with the answer, whether that shows the marker or not."""

_MAX_READ = 4096
"""Characters read at once. After each marker the rest of them is copied, so they bound what copying costs."""


class OutputParser(Protocol):
    """Takes one choice's text, gives its pieces. What they join to does not depend on where the text is cut."""

    def push(self, text: str) -> list[Piece]:
        """Return what `text` adds."""
        ...

    def finish(self) -> list[Piece]:
        """Return what was held back, now that no text follows. Nothing may be pushed after it."""
        ...


def open_parser(
    *, tools: Collection[str], tool_format: str, reasoning_format: str, begins_in_reasoning: bool = False
) -> OutputParser:
    """Return the parser of one choice.

    `tools`: the names of the functions that may be called. `begins_in_reasoning`: whether the prompt ends within
    reasoning; without a reasoning format it says nothing. Raises ValueError for a format that is none.
    """
    if tool_format not in TOOL_FORMATS:
        raise ValueError(f"tool_format {tool_format!r} is none of {', '.join(TOOL_FORMATS)}")
    if reasoning_format not in REASONING_FORMATS:
        raise ValueError(f"reasoning_format {reasoning_format!r} is none of {', '.join(REASONING_FORMATS)}")
    has_tools, has_reasoning = bool(tools) and tool_format != "none", reasoning_format != "none"
    if not has_tools and not has_reasoning:
        return _PassThrough()
    is_reasoning = has_reasoning and (begins_in_reasoning or reasoning_format == "think")
    calls = Calls(tools)
    content = ContentReader(
        _FORMATS[tool_format] if has_tools else (), calls, finds_reasoning=has_reasoning and not is_reasoning
    )
    return _ModeParser(
        content, ReasoningMode(is_opened=False) if is_reasoning else None, EndTokenFilter() if has_tools else None
    )


class _PassThrough:
    def push(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class _ModeParser:
    """Gives the text to what reads the part of the answer that it belongs to."""

    def __init__(self, content: ContentReader, mode: Mode | None, end_tokens: EndTokenFilter | None) -> None:
        self._content = content
        self._mode = mode
        """What reads now, if it is not content."""
        self._end_tokens = end_tokens

    def push(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        self._read(text if self._end_tokens is None else self._end_tokens.push(text), out)
        return joined(out)

    def finish(self) -> list[Piece]:
        out: list[Piece] = []
        if self._end_tokens is not None:
            self._read(self._end_tokens.finish(), out)
        (self._content if self._mode is None else self._mode).finish(out)
        return joined(out)

    def _read(self, text: str, out: list[Piece]) -> None:
        for start in range(0, len(text), _MAX_READ):
            part = text[start : start + _MAX_READ]
            while part:
                part = self._read_part(part, out)

    def _read_part(self, text: str, out: list[Piece]) -> str:
        if self._mode is None:
            self._mode, text = self._content.push(text, out)
            return text
        rest = self._mode.push(text, out)
        if rest is None:
            return ""
        self._content.resume(self._mode.lead)
        self._mode = None
        return rest
