"""How the client connects."""

from __future__ import annotations

import base64
import json

import grpc
import grpc.aio

DEFAULT_ADDRESS = "127.0.0.1:50051"

KEEPALIVE_S = 30
"""How often a connection with calls in flight is tried, in seconds. Servers allow it every 10 s."""

MAX_RECEIVE_BYTES = 32 * 1024 * 1024

_ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})


_TICKET_KEY = "kvern-ticket"


def ticket_metadata(ticket: bytes) -> tuple[tuple[str, str], ...]:
    """Return a ticket as metadata of a call, nothing where there is none."""
    return ((_TICKET_KEY, base64.b64encode(ticket).decode()),) if ticket else ()


def channel_options(authority: str | None = None) -> list[tuple[str, int | str]]:
    """authority: the name to call the server by, where that is not its address."""
    return [
        *([] if authority is None else [("grpc.default_authority", authority)]),
        # Without these two, a reader that stops still swallows megabytes, and the server cannot know that it stopped.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 16384),
        # A server that vanished without a word is noticed while a call waits for it, however long it waits.
        ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        # Calls are repeated here, where it is known what their caller has received.
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # All addresses of a name are used, and new ones soon after a connection ends.
        ("grpc.service_config", _ROUND_ROBIN),
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ]


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, authority: str | None = None
) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(address, channel_options(authority))
    return grpc.secure_channel(address, credentials, channel_options(authority))


def open_aio_channel(
    address: str, credentials: grpc.ChannelCredentials | None, authority: str | None = None
) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, channel_options(authority))
    return grpc.aio.secure_channel(address, credentials, channel_options(authority))
