from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from kvern.services.router.identity.api_keys import ApiKeys, hash_of
from kvern.services.router.identity.caller import Caller, Role
from kvern.services.router.identity.rejection import Cause, Rejected
from tests.up_process import KVERN


def _file(**fields: str) -> bytes:
    entry = {"id": "mine", "sha256": hash_of("a key"), "tenant": "acme", **fields}
    return ("keys:\n  - " + "\n    ".join(f"{name}: {value}" for name, value in entry.items())).encode()


def _cause(keys: ApiKeys, key: str) -> Cause:
    with pytest.raises(Rejected) as rejected:
        keys.identify(key)
    return rejected.value.cause


def test_key_in_the_file_is_its_tenants() -> None:
    keys = ApiKeys.parse(_file(roles="[admin]", expires_at="2100-01-01T00:00:00Z"))
    assert keys.identify("a key") == Caller("key:mine", "acme", frozenset({Role.ADMIN}))


def test_key_not_in_the_file_or_out_of_date_is_rejected() -> None:
    assert _cause(ApiKeys.parse(_file()), "another key") is Cause.UNKNOWN
    assert _cause(ApiKeys.parse(_file()), hash_of("a key")) is Cause.UNKNOWN
    assert _cause(ApiKeys.parse(_file(expires_at="2020-01-01T00:00:00Z")), "a key") is Cause.EXPIRED
    assert _cause(ApiKeys.parse(_file()), "k" * 10_000) is Cause.MALFORMED


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        (_file(sha256="abc"), r"keys\.0\.sha256"),
        (_file(roles="[root]"), r"keys\.0\.roles"),
        (_file(expires_at="2030-01-01T00:00:00"), r"keys\.0\.expires_at"),
        (_file(id='"a\\nb"'), r"keys\.0\.id"),
        (_file(secret="x"), r"keys\.0\.secret"),
        (_file() + _file()[5:], "two keys have the same id"),
        (b"- 1", "file: Input should be"),
        (b"keys: [", "not YAML, line 2"),
    ],
)
def test_file_with_a_fault_is_refused_naming_it(file: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as refused:
        ApiKeys.parse(file)
    assert hash_of("a key") not in str(refused.value)


def test_new_key_and_its_entry_belong_together(tmp_path: Path) -> None:
    command = [KVERN, "keys", "new", "ci", "--tenant", "acme", "--expires", "2100-01-31"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    key = made.stderr.split()[-1]
    assert key.startswith("kvern_")
    assert key not in made.stdout
    assert hashlib.sha256(key.encode()).hexdigest() in made.stdout
    assert ApiKeys.parse(b"keys:\n" + made.stdout.encode()).identify(key).id == "key:ci"
