"""Authorities and the certificates they sign, as files."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return (f"--tls-cert={self.certificate}", f"--tls-key={self.key}")

    def replace_by(self, other: Pair) -> None:
        """Put another pair in the place of this one, as a rotation does."""
        other.certificate.replace(self.certificate)
        other.key.replace(self.key)


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name(name)
        made = _build(self._name, self._name, self._key.public_key())
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = made.sign(self._key, hashes.SHA256())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, file_name: str, *names: str) -> Pair:
        """Make a certificate for 127.0.0.1, localhost and further names in DNS, addresses or, with ://, URIs."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _build(_common_name(file_name), self._name, key.public_key())
        made = made.add_extension(x509.SubjectAlternativeName([*_LOCAL, *map(_alternative, names)]), critical=False)
        certificate = made.sign(self._key, hashes.SHA256())
        pair = Pair(self._folder / f"{file_name}.pem", self._folder / f"{file_name}.key")
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


_LOCAL: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    is_address = name.replace(".", "").isdecimal()
    return x509.IPAddress(ipaddress.ip_address(name)) if is_address else x509.DNSName(name)


def _build(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
