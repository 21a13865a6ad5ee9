"""What a tokenizer and the processes that render its chats say to each other: frames of JSON over a socket."""

from __future__ import annotations

import json
import struct
from typing import IO, Any

MAX_CPU_S = 1.0
"""Of a process for one chat, in seconds: real ones take thousandths of it."""

MAX_BYTES = 512 * 1024 * 1024
"""Of memory for one chat."""

MAX_RENDERED_CHARS = 64 * 1024 * 1024

_HEADER = struct.Struct("<Q")


def write_frame(stream: IO[bytes], message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    stream.write(_HEADER.pack(len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """Return the next message, None where the other side is gone."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (num_bytes,) = _HEADER.unpack(header)
    data = stream.read(num_bytes)
    return json.loads(data) if len(data) == num_bytes else None
