"""Answers taken apart for tests, and put together from their pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvern.services.gateway.parsing import Content, Piece, Reasoning, ToolCallArguments, ToolCallBegins, open_parser

TOOLS = ("get_weather", "f", "add")


@dataclass
class Answer:
    """What the pieces of an answer join to."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""

    def add(self, piece: Piece) -> None:
        """Add the next piece; a call's must be in order."""
        match piece:
            case Content(text):
                assert text
                self.content += text
            case Reasoning(text):
                assert text
                self.reasoning += text
            case ToolCallBegins(index, name):
                assert index == len(self.calls)
                self.calls.append((name, ""))
            case ToolCallArguments(index, text):
                assert text
                assert index == len(self.calls) - 1
                name, arguments = self.calls[index]
                self.calls[index] = (name, arguments + text)


def parse(
    texts: str | Iterable[str],
    *,
    tools: Iterable[str] = TOOLS,
    tool_format: str = "auto",
    reasoning_format: str = "auto",
    begins_in_reasoning: bool = False,
) -> Answer:
    """Push the texts, or one text, and join what comes."""
    parser = open_parser(
        tools=tuple(tools),
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        begins_in_reasoning=begins_in_reasoning,
    )
    answer = Answer()
    for text in [texts] if isinstance(texts, str) else texts:
        for piece in parser.push(text):
            answer.add(piece)
    for piece in parser.finish():
        answer.add(piece)
    return answer
