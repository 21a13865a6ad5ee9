"""Tickets: a router's word to a replica that a client may call it, as whom, and for how long.

A ticket is a version byte, an HMAC-SHA256 of all the rest, and what it says, in JSON. It names no replica: where a
client was sent may be gone, and another one of the same model will do. Until it expires it may be used again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvern.services.runtime.errors import Unauthenticated
from kvern.services.runtime.reloading import Reloaded, UnusableFile, read_bytes

METADATA_KEY = "kvern-ticket"
"""Of the call that brings a ticket, in base64: gRPC takes bytes only under names that end in -bin."""

LIFE_S = 60.0
CLOCK_SKEW_S = 5.0
"""By which the clocks of who signs and who verifies may differ."""

MIN_KEY_BYTES = 32
MAX_TICKET_BYTES = 4096

_VERSION = b"\x01"
_MAC_BYTES = hashlib.sha256().digest_size
_PURPOSE = b"kvern ticket"
"""In what is signed: a key that were used for something else as well would sign no tickets there."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a replica is told of a caller."""

    tenant: str
    salt: str
    """The request's cache salt, whatever the request says."""
    model: str
    priority_cap: int | None
    """Its request runs no earlier than this priority. None: as it says."""
    expires_at: float
    """In seconds of Unix time."""


class TicketKeys:
    """The keys in a file, one a line. The first signs, all verify: so they are rotated without a ticket lost."""

    def __init__(self, file: Path) -> None:
        """Raises UnusableFile."""
        self._keys = Reloaded([file], lambda: read_keys(file))

    def sign(self, ticket: Ticket) -> bytes:
        return sign(self._keys.get()[0], ticket)

    def verify(self, signed: bytes) -> Ticket:
        """Raises Unauthenticated."""
        return verify(self._keys.get(), signed, time.time())


def sign(key: bytes, ticket: Ticket) -> bytes:
    said = json.dumps(asdict(ticket), separators=(",", ":")).encode()
    return _VERSION + _mac(key, said) + said


def verify(keys: Sequence[bytes], signed: bytes, now: float) -> Ticket:
    """Return what a ticket says that one of the keys has signed.

    Raises Unauthenticated with reason TICKET_INVALID or TICKET_EXPIRED.
    """
    version, mac, said = signed[:1], signed[1 : 1 + _MAC_BYTES], signed[1 + _MAC_BYTES :]
    if len(signed) > MAX_TICKET_BYTES or version != _VERSION:
        raise _invalid("the ticket is none of this version")
    if not any(hmac.compare_digest(_mac(key, said), mac) for key in keys):
        raise _invalid("the ticket is signed by no key that is known here")
    ticket = Ticket(**json.loads(said))
    if now > ticket.expires_at + CLOCK_SKEW_S:
        raise Unauthenticated("the ticket has expired; ask Route for another", reason="TICKET_EXPIRED")
    return ticket


def from_metadata(text: str | bytes) -> bytes:
    """Return the ticket in a call's metadata. Raises Unauthenticated with reason TICKET_INVALID."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _invalid(f"{METADATA_KEY} must hold a ticket in base64") from error


def read_keys(file: Path) -> tuple[bytes, ...]:
    """Read keys, one a line. Raises UnusableFile."""
    keys = tuple(line.strip() for line in read_bytes(file).splitlines() if line.strip())
    if not keys:
        raise UnusableFile(f"{file}: holds no key")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_BYTES:
            raise UnusableFile(f"{file}: key {number} has {len(key)} bytes, the least is {MIN_KEY_BYTES}")
    return keys


def _mac(key: bytes, said: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + _VERSION + said, "sha256")


def _invalid(message: str) -> Unauthenticated:
    return Unauthenticated(message, reason="TICKET_INVALID")
