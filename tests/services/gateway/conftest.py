from __future__ import annotations

import socket

import pytest


@pytest.fixture(scope="module")
def listen() -> str:
    """A free address of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
