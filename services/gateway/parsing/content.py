"""The part of an answer that is neither reasoning nor a call: where those begin is found here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvern.services.gateway.parsing import reasoning
from kvern.services.gateway.parsing.calls import CallMode, Calls, ToolFormat
from kvern.services.gateway.parsing.json_scanner import SPACE
from kvern.services.gateway.parsing.markers import MAX_SPACE, Found, Lead, MarkerSearch
from kvern.services.gateway.parsing.pieces import Content, Piece
from kvern.services.gateway.parsing.reasoning import ReasoningMode

Mode = CallMode | ReasoningMode

_FENCE = "```"
_QUOTED_OPENING = "`" + reasoning.OPENING
"""Text about the marker, which would make reasoning of all that follows."""
_BARE_LEAD = re.compile(rf"[{SPACE}]{{0,{MAX_SPACE}}}(?:\[[{SPACE}]{{0,{MAX_SPACE}}})?")


class ContentReader:
    """Reads content up to the next reasoning or call. Markers between code fences are content.

    An answer has at most one part of reasoning: what looks like another is text about it.
    """

    def __init__(self, formats: Sequence[ToolFormat], calls: Calls, *, finds_reasoning: bool) -> None:
        self._formats = {tool_format.opening: tool_format for tool_format in formats}
        self._calls = calls
        self._finds_reasoning = finds_reasoning
        self._is_blank = True
        self._is_code = False
        self._lead: Lead | None = None
        self._bare_format = next((tool_format for tool_format in formats if tool_format.is_bare), None)
        self._bare_lead: str | None = ""
        """The answer's beginning as long as it may be that of a call without a marker, then None."""
        self._search: MarkerSearch | None = None
        self._begin_search()

    def resume(self, lead: Lead | None) -> None:
        """Go on after reasoning or a call. `lead` is passed over."""
        self._lead = lead

    def push(self, text: str, out: list[Piece]) -> tuple[Mode | None, str]:
        """Read text; return what reads on from here, if not this, and the text it is to read."""
        if self._lead is not None:
            text = self._lead.push(text)
            if not text:
                return None, ""
            self._lead = None
        if self._bare_format is not None and self._bare_lead is not None:
            return self._read_bare_lead(self._bare_format, self._bare_lead + text)
        if self._search is None:
            self._show(text, out)
            return None, ""
        shown, found = self._search.push(text)
        self._show(shown, out)
        return (None, "") if found is None else (self._open(found, out), found.rest)

    def finish(self, out: list[Piece]) -> None:
        """Take it that no text follows."""
        held = (
            self._lead.held if self._lead is not None else "",
            self._bare_lead or "",
            self._search.held if self._search is not None else "",
        )
        self._show("".join(held), out)

    def _show(self, text: str, out: list[Piece]) -> None:
        if text:
            out.append(Content(text))
            self._is_blank = False

    def _begin_search(self) -> None:
        markers = [*self._formats]
        if self._finds_reasoning:
            markers += [reasoning.OPENING, _QUOTED_OPENING]
        if self._is_code:
            markers = []
        self._search = MarkerSearch((*markers, _FENCE)) if markers or self._is_code else None

    def _read_bare_lead(self, bare_format: ToolFormat, text: str) -> tuple[Mode | None, str]:
        lead = _BARE_LEAD.match(text)
        assert lead is not None
        if lead.end() == len(text):
            self._bare_lead = text
            return None, ""
        self._bare_lead = None
        return (self._call(bare_format, "") if text[lead.end()] == "{" else None), text

    def _open(self, found: Found, out: list[Piece]) -> Mode | None:
        if found.marker in self._formats:
            return self._call(self._formats[found.marker], found.space + found.marker)
        if found.marker == reasoning.OPENING:
            return self._reasoning()
        self._show(found.space + found.marker, out)
        self._is_code ^= found.marker == _FENCE
        self._begin_search()
        return None

    def _call(self, tool_format: ToolFormat, held: str) -> CallMode:
        self._is_blank = False
        return CallMode(tool_format.reader(self._calls, held), tool_format.closing)

    def _reasoning(self) -> ReasoningMode:
        self._finds_reasoning = False
        self._begin_search()
        self._bare_lead = "" if self._is_blank else None
        return ReasoningMode(is_opened=True)
