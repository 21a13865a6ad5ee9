"""Calls as Hermes 2 Pro, Qwen 2.5 and Qwen 3 write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

Source: NousResearch/Hermes-Function-Calling; the chat templates of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B.
"""

from __future__ import annotations

from kvern.services.gateway.parsing.call_object import CallObject
from kvern.services.gateway.parsing.calls import ToolFormat

HERMES = ToolFormat(opening="<tool_call>", closing="</tool_call>", reader=CallObject)
