"""TLS of listeners and channels, from files that are read again when they change.

gRPC speaks TLS 1.2 and 1.3, HTTP 1.3 alone. Unix sockets stay plain: who may open them, the file system says.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from kvern.services.runtime.reloading import Reloaded, UnusableFile, read_bytes
from kvern.services.runtime.settings import ServiceSettings


class KeyPair(NamedTuple):
    """Paths of a certificate, with those that lead to its authority, and of its key."""

    certificate: Path
    key: Path


class Pem(NamedTuple):
    """A certificate chain and its key, in PEM."""

    chain: bytes
    key: bytes


class ServerTls:
    """Proves who listens, and where `client_ca` is given asks callers to prove who they are."""

    def __init__(self, pair: KeyPair, client_ca: Path | None) -> None:
        """Raises UnusableFile."""
        self._pair = pair
        self._client_ca = client_ca
        self._files = [*pair, *_given(client_ca)]
        self._configuration = Reloaded(self._files, self._configure)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a gRPC listener. Each handshake is made with what the files hold then."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration.get(), self._configuration.get, self._client_ca is not None
        )

    def ssl_context(self, *, asks_callers: bool = True) -> ssl.SSLContext:
        """Return the context of an HTTP listener. Each handshake is made with what the files hold then.

        asks_callers: for their certificates, where there is an authority for those.
        """
        client_ca = self._client_ca if asks_callers else None
        return _LatestContext(Reloaded(self._files, lambda: _server_context(self._pair, client_ca)))

    def _configure(self) -> grpc.ServerCertificateConfiguration:
        pem = read_pair(self._pair)
        client_ca = None if self._client_ca is None else read_certificates(self._client_ca)
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], client_ca)


class ClientTls:
    """Trusts servers of one authority, and shows them a certificate if there is one."""

    def __init__(self, ca: Path, pair: KeyPair | None) -> None:
        """Raises UnusableFile."""
        self._ca = ca
        self._pair = pair
        self._credentials = Reloaded([ca, *(pair or ())], self._read)

    def credentials(self) -> grpc.ChannelCredentials:
        """Return what the files hold now: the same object as long as they do not change."""
        return self._credentials.get()

    def _read(self) -> grpc.ChannelCredentials:
        pem = None if self._pair is None else read_pair(self._pair)
        return grpc.ssl_channel_credentials(read_certificates(self._ca), pem and pem.key, pem and pem.chain)


def server_tls(settings: ServiceSettings) -> ServerTls | None:
    """Return how a process serves TCP; None: without TLS. Raises UnusableFile."""
    pair = _pair_of(settings)
    return None if pair is None else ServerTls(pair, settings.tls_client_ca)


def client_tls(settings: ServiceSettings) -> ClientTls | None:
    """Return how a process calls others over TCP; None: without TLS. Raises UnusableFile."""
    return None if settings.tls_ca is None else ClientTls(settings.tls_ca, _pair_of(settings))


def read_pair(pair: KeyPair) -> Pem:
    """Read a certificate and its key. Raises UnusableFile, also where they do not belong together."""
    chain, key = read_certificates(pair.certificate), read_bytes(pair.key)
    try:
        private_key = load_pem_private_key(key, password=None)
        certified = x509.load_pem_x509_certificate(chain).public_key()
    except (ValueError, TypeError) as error:
        raise UnusableFile(f"{pair.key}: not a private key in PEM without a password") from error
    except UnsupportedAlgorithm as error:
        raise UnusableFile(f"{pair.certificate}, {pair.key}: {error}") from error
    if certified != private_key.public_key():
        raise UnusableFile(f"{pair.key}: not the key of the first certificate in {pair.certificate}")
    return Pem(chain, key)


def read_certificates(file: Path) -> bytes:
    """Read certificates in PEM. Raises UnusableFile."""
    data = read_bytes(file)
    try:
        x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise UnusableFile(f"{file}: holds no certificates in PEM, or one that is broken") from error
    return data


class _LatestContext(ssl.SSLContext):
    """Begins each connection in the context of the moment: a context itself keeps what it has loaded."""

    _latest: Reloaded[ssl.SSLContext]

    def __new__(cls, latest: Reloaded[ssl.SSLContext]) -> _LatestContext:
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._latest = latest
        return context

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self._latest.get().wrap_bio(*args, **kwargs)


def _server_context(pair: KeyPair, client_ca: Path | None) -> ssl.SSLContext:
    read_pair(pair)  # says what is wrong better than ssl does
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(*pair)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise UnusableFile(f"{pair.certificate}, {pair.key}, {client_ca}: {error}") from error
    return context


def _pair_of(settings: ServiceSettings) -> KeyPair | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return KeyPair(settings.tls_cert, settings.tls_key)


def _given(file: Path | None) -> list[Path]:
    return [] if file is None else [file]
