"""When certificates expire, from files that are written while the process runs."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import CollectorRegistry

from kvern.services.runtime.certificates import redis_certificate_files, watch_certificates

NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "redis")])
KEY = ec.generate_private_key(ec.SECP256R1())
START = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)


def certificate(days: int) -> bytes:
    """Return a certificate that signs itself, good for so many days from START."""
    made = (
        x509.CertificateBuilder()
        .subject_name(NAME)
        .issuer_name(NAME)
        .public_key(KEY.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(START)
        .not_valid_after(START + datetime.timedelta(days=days))
        .sign(KEY, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


def key() -> bytes:
    return KEY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def expiry(days: int) -> float:
    return (START + datetime.timedelta(days=days)).timestamp()


def test_first_certificate_to_expire_counts_and_a_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    file, registry = tmp_path / "chain.pem", CollectorRegistry()
    file.write_bytes(certificate(90) + key() + certificate(30) + certificate(60))
    watch_certificates(registry, [str(file)])

    def told() -> float | None:
        return registry.get_sample_value("kvern_certificate_expiry_timestamp_seconds", {"file": str(file)})

    assert told() == expiry(30)
    renewed = tmp_path / "new.pem"
    renewed.write_bytes(certificate(365))
    renewed.replace(file)
    assert told() == expiry(365)
    file.unlink()
    assert told() is None
    file.write_bytes(b"no certificate")
    assert told() is None
    file.write_bytes(certificate(10))
    assert told() == expiry(10)


def test_without_certificates_nothing_is_told() -> None:
    registry = CollectorRegistry()
    watch_certificates(registry, [])
    assert list(registry.collect()) == []


@pytest.mark.parametrize(
    ("url", "files"),
    [
        (None, []),
        ("redis://host:6379?ssl_ca_certs=/ca.pem", []),
        ("rediss://host:6379", []),
        ("rediss://u:p@host?ssl_ca_certs=/ca.pem&ssl_certfile=/c%20d.pem&ssl_keyfile=/k.pem", ["/ca.pem", "/c d.pem"]),
        ("rediss://host?ssl_certfile=/ca.pem&ssl_ca_certs=/ca.pem", ["/ca.pem"]),
    ],
)
def test_certificate_files_are_those_that_a_rediss_url_names(url: str | None, files: list[str]) -> None:
    assert redis_certificate_files(url) == files
