from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from kvern.services.runtime.channel import MIN_PING_INTERVAL_S, SERVER_OPTIONS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, PING, GOAWAY = 1, 4, 6, 7
END_HEADERS = 4


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def header_block(**fields: str) -> bytes:
    """Encode headers as HPACK literals that no table holds. Underscores stand for colons and hyphens."""
    names = {"method": ":method", "scheme": ":scheme", "path": ":path", "authority": ":authority", "te": "te"}
    texts = [(names.get(name, "content-type"), value) for name, value in fields.items()]
    return b"".join(bytes([0, len(n)]) + n.encode() + bytes([len(v)]) + v.encode() for n, v in texts)


async def ping_during_a_silent_call(path: Path, count: int) -> bool:
    """Open a call that says nothing, and ping. Return whether the server answers all of them."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    request = header_block(
        method="POST", scheme="http", path="/test/Silent", authority="x", te="trailers", content_type="application/grpc"
    )
    writer.write(PREFACE + frame(SETTINGS) + frame(HEADERS, request, flags=END_HEADERS, stream=1))
    acks = 0
    for number in range(count):
        writer.write(frame(PING, number.to_bytes(8, "big")))
        while True:
            head = await reader.readexactly(9)
            kind, flags = head[3], head[4]
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind == GOAWAY:
                writer.close()
                return False
            if kind == PING and flags == 1:
                acks += 1
                break
        await asyncio.sleep(0.01)
    writer.close()
    return acks == count


@pytest.mark.parametrize(("interval_ms", "is_answered"), [(1, True), (MIN_PING_INTERVAL_S * 1000, False)])
async def test_server_takes_pings_of_a_silent_call_at_the_interval_it_permits(
    tmp_path: Path, interval_ms: int, is_answered: bool
) -> None:
    """E08: a long prefill says nothing, and keepalive pings must not end it for an attack."""
    permitted_ms = MIN_PING_INTERVAL_S * 1000
    options = [(name, interval_ms if value == permitted_ms else value) for name, value in SERVER_OPTIONS]
    release = asyncio.Event()

    async def silent(request_iterator: object, context: object) -> bytes:
        await release.wait()
        return b""

    server = grpc.aio.server(options=options)
    handler = grpc.stream_unary_rpc_method_handler(silent)  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Silent": handler}),))
    server.add_insecure_port(f"unix:{tmp_path}/server.sock")
    await server.start()
    try:
        assert await ping_during_a_silent_call(tmp_path / "server.sock", 8) is is_answered
    finally:
        release.set()
        await server.stop(0)
