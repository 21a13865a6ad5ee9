from __future__ import annotations

import grpc
import pytest

from kvern.client import AsyncClient, Client
from kvern.client.api_key import is_local, key_metadata


@pytest.mark.parametrize(
    "address",
    ["unix:/run/kvern.sock", "localhost:50051", "127.0.0.1:1", "127.1.2.3:1", "[::1]:50051", "dns:///localhost:1"],
)
def test_address_of_this_machine_may_get_a_key_in_plain_text(address: str) -> None:
    assert key_metadata("k", address, is_encrypted=False, plaintext_api_key=False) == (("authorization", "Bearer k"),)


@pytest.mark.parametrize(
    "address",
    [
        "kvern.example:50051",
        "10.0.0.1:1",
        "dns:///kvern:1",
        "ipv4:127.0.0.1:1,10.0.0.1:1",
        "localhost.example:1",
        "kvern",
    ],
)
def test_address_elsewhere_gets_no_key_in_plain_text_unless_that_is_wanted(address: str) -> None:
    assert not is_local(address)
    with pytest.raises(ValueError, match="plain text"):
        Client(address, api_key="k")
    for allowed in (
        {"is_encrypted": True, "plaintext_api_key": False},
        {"is_encrypted": False, "plaintext_api_key": True},
    ):
        assert key_metadata("k", address, **allowed)


def test_client_without_a_key_shows_none() -> None:
    assert key_metadata("", "kvern.example:1", is_encrypted=False, plaintext_api_key=False) == ()


async def test_client_in_tls_takes_a_key_for_anywhere() -> None:
    credentials = grpc.ssl_channel_credentials()
    with Client("kvern.example:1", credentials=credentials, api_key="k"):
        pass
    async with AsyncClient("kvern.example:1", credentials=credentials, api_key="k"):
        pass
    with pytest.raises(ValueError, match="plain text"):
        AsyncClient("kvern.example:1", api_key="k")
