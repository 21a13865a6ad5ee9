"""An answer's text taken apart as it comes: content, reasoning, tool calls. No I/O."""

from kvern.services.gateway.parsing.parser import REASONING_FORMATS, TOOL_FORMATS, OutputParser, open_parser
from kvern.services.gateway.parsing.pieces import Content, Piece, Reasoning, ToolCallArguments, ToolCallBegins

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "Content",
    "OutputParser",
    "Piece",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallBegins",
    "open_parser",
]
