"""Tickets: what is signed is believed until it expires, and nothing else."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.services.runtime.errors import Unauthenticated
from kvern.services.runtime.reloading import UnusableFile
from kvern.services.runtime.ticket import CLOCK_SKEW_S, Ticket, TicketKeys, from_metadata, sign, verify

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
NOW = 1_800_000_000.0
TICKET = Ticket(tenant="mill", salt="grain \u00e9", model="tiny", priority_cap=-3, expires_at=NOW)


def reason(keys: list[bytes], signed: bytes, now: float = NOW) -> str:
    with pytest.raises(Unauthenticated) as raised:
        verify(keys, signed, now)
    return raised.value.reason


@given(st.builds(Ticket, expires_at=st.floats(NOW, NOW + 100)))
def test_ticket_says_what_was_signed(ticket: Ticket) -> None:
    assert verify([OTHER_KEY, KEY], sign(KEY, ticket), NOW) == ticket


def test_ticket_expires_when_no_clock_can_be_that_far_off() -> None:
    signed = sign(KEY, TICKET)
    assert verify([KEY], signed, NOW + CLOCK_SKEW_S) == TICKET
    assert reason([KEY], signed, NOW + CLOCK_SKEW_S + 0.001) == "TICKET_EXPIRED"


def test_ticket_of_a_key_that_is_not_known_is_invalid() -> None:
    assert reason([KEY], sign(OTHER_KEY, TICKET)) == "TICKET_INVALID"


def test_ticket_with_any_bit_changed_is_invalid() -> None:
    signed = sign(KEY, TICKET)
    for position in range(len(signed)):
        changed = bytearray(signed)
        changed[position] ^= 1
        assert reason([KEY], bytes(changed)) == "TICKET_INVALID"


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda rest: b"\x01" + rest) | st.just(b"\x01" * 5000))
def test_bytes_that_nobody_signed_are_invalid(signed: bytes) -> None:
    assert reason([KEY], signed) == "TICKET_INVALID"


@pytest.mark.parametrize("text", ["no base64!", "abc", "\u00e9"])
def test_metadata_that_is_no_base64_is_invalid(text: str) -> None:
    with pytest.raises(Unauthenticated, match="base64"):
        from_metadata(text)


def test_keys_are_rotated_without_a_ticket_lost(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(KEY + b"\n")
    keys, ticket = TicketKeys(file), dataclasses.replace(TICKET, expires_at=time.time() + 60)
    of_old = keys.sign(ticket)
    file.write_bytes(OTHER_KEY + b"\n\n" + KEY)
    of_new = keys.sign(ticket)
    assert of_new == sign(OTHER_KEY, ticket)
    assert keys.verify(of_old) == keys.verify(of_new) == ticket
    file.write_bytes(b"short")
    assert keys.verify(of_new) == ticket
    file.write_bytes(OTHER_KEY)
    with pytest.raises(Unauthenticated):
        keys.verify(of_old)


@pytest.mark.parametrize(("content", "said"), [(b"\n", "no key"), (KEY + b"\nshort\n", "key 2 has 5 bytes")])
def test_file_without_good_keys_is_refused_without_telling_them(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(UnusableFile, match=said) as raised:
        TicketKeys(file)
    assert "short" not in str(raised.value)
