"""When the certificates that a process uses expire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import structlog
from cryptography import x509
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvern.services.runtime.reloading import FileVersion, version_of

_QUERY_FIELDS = ("ssl_ca_certs", "ssl_certfile")

_log = structlog.get_logger("kvern.certificates")


class _Read(NamedTuple):
    version: FileVersion | None
    """None where there is no such file."""
    expires_at: float | None


def redis_certificate_files(redis_url: str | None) -> list[str]:
    """Return the files with certificates that a Redis URL names."""
    url = urlsplit(redis_url or "")
    query = parse_qs(url.query) if url.scheme.startswith("rediss") else {}
    return list(dict.fromkeys(path for field in _QUERY_FIELDS for path in query.get(field, ())))


def watch_certificates(registry: CollectorRegistry, files: Iterable[str]) -> None:
    """Tell when certificate files expire, if there are any."""
    if files := list(files):
        registry.register(CertificateExpiry(files))


class CertificateExpiry(Collector):
    """Reads files of certificates in PEM when it is asked, and again when they have changed."""

    def __init__(self, files: Iterable[str]) -> None:
        self._read = dict.fromkeys(files, _Read(None, None))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "kvern_certificate_expiry_timestamp_seconds",
            "When the first certificate in a file that this process uses expires, in seconds of Unix time. Absent for a"
            " file that cannot be read.",
            labels=["file"],
        )
        for file in list(self._read):
            if (expires_at := self._expiry_of(file)) is not None:
                family.add_metric([file], expires_at)
        yield family

    def _expiry_of(self, file: str) -> float | None:
        version = version_of(file)
        read = self._read[file]
        if version != read.version:
            read = self._read[file] = _Read(version, first_expiry(file))
        return read.expires_at


def first_expiry(file: str) -> float | None:
    """Return when the first of a file's certificates expires, in seconds of Unix time; None if none can be read."""
    try:
        certificates = x509.load_pem_x509_certificates(Path(file).read_bytes())
    except (OSError, ValueError) as error:
        _log.warning("cannot read certificates", file=file, error=str(error))
        return None
    return min(certificate.not_valid_after_utc.timestamp() for certificate in certificates)
