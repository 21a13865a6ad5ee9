"""Outputs that are tool calls and nothing else, because a schema held them to that."""

from __future__ import annotations

from collections.abc import Collection

from kvern.services.gateway.parsing import OutputParser, Piece, ToolCallArguments, ToolCallBegins, open_parser

_CALLS_BEGIN = "<|python_tag|>"
"""After which a list of calls may stand off as far as the grammar lets it."""


class NamedCall:
    """The arguments of one tool, which the client named."""

    def __init__(self, name: str) -> None:
        self._begins: list[Piece] = [ToolCallBegins(0, name)]

    def push(self, text: str) -> list[Piece]:
        pieces, self._begins = self._begins, []
        return [*pieces, ToolCallArguments(0, text)]

    def finish(self) -> list[Piece]:
        return []


def open_listed_calls(tools: Collection[str]) -> OutputParser:
    """Return what reads a list as `tools.schema_of_calls` has it, which is how Llama 3 writes calls."""
    parser = open_parser(tools=tools, tool_format="llama3", reasoning_format="none")
    parser.push(_CALLS_BEGIN)
    return parser
