"""A password and certificates for Redis, from files that are read again when they change."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError

from kvern.services.runtime.reloading import Reloaded, UnusableFile, read_bytes
from kvern.services.runtime.tls import KeyPair, read_certificates, read_pair

TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""As redis-py names them."""


class PasswordFile(CredentialProvider):
    """Logs in with the password that a file holds when a connection is made."""

    def __init__(self, user: str | None, file: Path) -> None:
        """user: None is the server's default one. Raises UnusableFile."""
        self._user = user
        self._password = Reloaded([file], lambda: _read_password(file))

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._password.get()
        return (password,) if self._user is None else (self._user, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class ReloadingConnection(SSLConnection):
    """Connects with what its certificate files hold at that time; the library reads them once."""

    _tls: Reloaded[ssl.SSLContext] | None = None

    def _connection_arguments(self) -> Mapping[str, Any]:
        try:
            if self._tls is None:
                self._tls = Reloaded(self._files, self._read_files)
            self.ssl_context.context = self._tls.get()
        except UnusableFile as error:
            raise RedisConnectionError(str(error)) from error
        return super()._connection_arguments()

    @property
    def _files(self) -> list[Path]:
        tls = self.ssl_context
        return [Path(file) for file in (tls.ca_certs, tls.certfile, tls.keyfile) if file]

    def _read_files(self) -> ssl.SSLContext:
        self.ssl_context.context = None
        try:
            return self.ssl_context.get()
        except OSError as error:
            raise UnusableFile(f"{', '.join(map(str, self._files))}: {error}") from error


class ReloadingSentinelConnection(SentinelManagedConnection, ReloadingConnection):
    """The same, to whom the sentinels name."""


def check_tls_files(options: Mapping[str, str]) -> None:
    """Raise UnusableFile for certificates, by TLS_FILES, that no connection could be made with."""
    if "ssl_ca_certs" in options:
        read_certificates(Path(options["ssl_ca_certs"]))
    if "ssl_certfile" in options:
        key = options.get("ssl_keyfile", options["ssl_certfile"])
        read_pair(KeyPair(Path(options["ssl_certfile"]), Path(key)))


def _read_password(file: Path) -> str:
    try:
        password = read_bytes(file).decode().rstrip("\n")
    except UnicodeDecodeError as error:
        raise UnusableFile(f"{file}: holds no password in UTF-8") from error
    if not password:
        raise UnusableFile(f"{file}: holds no password")
    return password
