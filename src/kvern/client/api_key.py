"""How the client shows who it is."""

from __future__ import annotations

import ipaddress


def key_metadata(
    api_key: str, address: str, *, is_encrypted: bool, plaintext_api_key: bool
) -> tuple[tuple[str, str], ...]:
    """Return an API key or token as metadata of every call, nothing where there is none.

    Raises ValueError where it would cross a network in plain text and `plaintext_api_key` does not say that it may.
    """
    if not api_key:
        return ()
    if not is_encrypted and not plaintext_api_key and not is_local(address):
        raise ValueError(f"an API key would go to {address} in plain text; use TLS, or plaintext_api_key=True")
    return (("authorization", f"Bearer {api_key}"),)


def is_local(address: str) -> bool:
    """Whether calls to an address, as gRPC takes it, never leave this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    scheme, separator, rest = address.partition(":")
    targets = rest if separator and scheme in ("dns", "ipv4", "ipv6") else address
    return all(_is_loopback(target) for target in targets.removeprefix("///").split(","))


def _is_loopback(target: str) -> bool:
    host = target.partition("]")[0].removeprefix("[") if target.startswith("[") else target.rpartition(":")[0] or target
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
