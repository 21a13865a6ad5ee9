"""Addresses as people type them."""

from __future__ import annotations

import socket

import pytest

from kvern.services.runtime.http_server import bind
from kvern.supervisor.addresses import Address, AddressError, claim, parse_address


@pytest.mark.parametrize("text", ["127.0.0.1:50051", "[::1]:8000", "localhost:0"])
def test_address_prints_as_it_was_read(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize("text", ["", "localhost", ":80", "localhost:", "localhost:http", "localhost:65536", "[]:1"])
def test_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="host:port"):
        parse_address(text)


def test_every_interface_is_reached_at_loopback() -> None:
    assert Address("0.0.0.0", 1).reachable == Address("127.0.0.1", 1)


def test_port_0_becomes_one_that_nobody_else_is_given_and_servers_can_take() -> None:
    with claim(Address("127.0.0.1", 0), "--listen") as claimed:
        with claim(claimed, "--listen") as again:
            assert again == claimed
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((claimed.host, claimed.port))
        with bind(str(claimed)), socket.create_connection((claimed.host, claimed.port)):
            pass


def test_taken_port_is_refused_by_number_and_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        claiming = claim(Address("127.0.0.1", port), "--http")
        with pytest.raises(AddressError, match=f"--http: port {port} "), claiming:
            pass


def test_address_of_another_machine_is_refused() -> None:
    claiming = claim(Address("192.0.2.1", 80), "--http")
    with pytest.raises(AddressError, match=r"--http: cannot listen on 192\.0\.2\.1:80"), claiming:
        pass
