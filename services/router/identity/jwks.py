"""The public keys of a token issuer: fetched beside the event loop, kept when the issuer is away."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError
from prometheus_client import CollectorRegistry, Gauge

from kvern.services.runtime.errors import Unavailable
from kvern.services.runtime.log_text import logged

REFRESH_S = 300.0
MIN_INTERVAL_S = 10.0
"""Between two fetches, whatever tokens come: their key ids are whatever their senders write."""
FETCH_TIMEOUT_S = 5.0
MAX_BYTES = 256 * 1024
MAX_KEYS = 100
MIN_RSA_BITS = 2048

_ALGORITHMS = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
}
"""By type of key. What is symmetric is not among them, nor is `none`."""

_log = structlog.get_logger("kvern.identity")


class PublicKey(NamedTuple):
    """A key of the issuer, and what it may be used with."""

    key: Any
    """One of cryptography's public keys."""
    algorithms: tuple[str, ...]


class Jwks:
    """An issuer's keys by id. `watch` keeps them up to date."""

    def __init__(self, source: str) -> None:
        """source: https URL, http URL of this machine, or a file's path."""
        self.fetched_at = 0.0
        """When the keys were last had, in seconds of Unix time."""
        self._source = source
        self._keys: dict[str, PublicKey] | None = None
        self._asked_at = -MIN_INTERVAL_S
        self._fetching: asyncio.Task[None] | None = None

    async def find(self, kid: str | None) -> PublicKey | None:
        """Return a key by its id; without one, the only key there is. An unknown id has the keys fetched again.

        Raises Unavailable while no keys have been had.
        """
        if (key := self._known(kid)) is not None:
            return key
        await self._fetch_if_due()
        if self._keys is None:
            raise Unavailable("the keys of the tokens' issuer are not known yet")
        return self._known(kid)

    async def watch(self) -> None:
        """Fetch the keys now and then for ever."""
        while True:
            await self._fetch_if_due()
            # Until keys are there, as often as may be.
            await asyncio.sleep(MIN_INTERVAL_S if self._keys is None else REFRESH_S)

    def _known(self, kid: str | None) -> PublicKey | None:
        keys = self._keys or {}
        if kid is None:
            return next(iter(keys.values())) if len(keys) == 1 else None
        return keys.get(kid)

    async def _fetch_if_due(self) -> None:
        """Fetch, or wait for the fetch under way; do nothing where the last one was a moment ago."""
        if self._fetching is None:
            if time.monotonic() - self._asked_at < MIN_INTERVAL_S:
                return
            self._asked_at = time.monotonic()
            self._fetching = asyncio.create_task(self._fetch())
        await asyncio.shield(self._fetching)

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                data = await asyncio.to_thread(_read, self._source)
            self._keys = parse_keys(data)
            self.fetched_at = time.time()
        except Exception as error:  # whatever it is that answers there, the router goes on
            stays = "none are known" if self._keys is None else "those known stay in force"
            said = logged(str(error)) or type(error).__name__
            _log.error(f"cannot get the issuer's keys; {stays}", source=self._source, error=said)
        finally:
            self._fetching = None


def tell_age(registry: CollectorRegistry, keys: Jwks) -> None:
    """Have scrapers see since when the issuer's keys have not been had again."""
    Gauge(
        "kvern_router_issuer_keys_fetched_timestamp_seconds",
        "When the keys of the tokens' issuer were last fetched, in seconds of Unix time; 0 while they never were."
        " Absent where no tokens are taken.",
        registry=registry,
    ).set_function(lambda: keys.fetched_at)


def parse_keys(data: bytes) -> dict[str, PublicKey]:
    """Return the keys that can check signatures, by id; others are left out. Raises ValueError for what is no JWKS."""
    document = json.loads(data)
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise ValueError(f"no JWKS of at most {MAX_KEYS} keys")
    usable = ((str(entry.get("kid", "")), _public_key(entry)) for entry in entries if isinstance(entry, dict))
    return {kid: key for kid, key in usable if key is not None}


def _public_key(entry: dict[str, Any]) -> PublicKey | None:
    algorithms = _ALGORITHMS.get(str(entry.get("kty")), ())
    if (algorithm := entry.get("alg")) is not None:
        algorithms = tuple(each for each in algorithms if each == algorithm)
    if not algorithms or entry.get("use", "sig") != "sig":
        return None
    try:
        key = PyJWK(entry, algorithms[0]).key
    except (PyJWTError, ValueError):
        return None
    if not hasattr(key, "verify") or (isinstance(key, RSAPublicKey) and key.key_size < MIN_RSA_BITS):
        return None  # a private key, which has no business there, or one that is too short
    return PublicKey(key, algorithms)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def _read(source: str) -> bytes:
    """Return what a URL or a file holds. Raises OSError, ValueError where it is too large."""
    if "://" not in source:
        data = Path(source).read_bytes()
    else:
        opener = urllib.request.build_opener(_NoRedirects)
        with opener.open(source, timeout=FETCH_TIMEOUT_S) as response:
            data = _read_in_time(response)
    if len(data) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES} bytes")
    return data


def _read_in_time(response: Any) -> bytes:
    """Read a response that may come a byte at a time, until it is too large or late."""
    deadline, data = time.monotonic() + FETCH_TIMEOUT_S, b""
    while len(data) <= MAX_BYTES and (piece := response.read1(65536)):
        data += piece
        if time.monotonic() > deadline:
            raise TimeoutError(f"not there within {FETCH_TIMEOUT_S:g} s")
    return data
