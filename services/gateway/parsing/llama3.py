"""Calls as Llama 3.1 and later write them: {"name": ..., "parameters": {...}}, with or without <|python_tag|>.

Several are parted by semicolons or newlines, or are an array. Source: Llama 3.1's model card and prompt formats.
"""

from __future__ import annotations

from kvern.services.gateway.parsing.call_sequence import CallSequence
from kvern.services.gateway.parsing.calls import ToolFormat

LLAMA3 = ToolFormat(opening="<|python_tag|>", closing="", reader=CallSequence, is_bare=True)
