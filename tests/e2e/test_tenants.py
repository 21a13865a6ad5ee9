"""Two tenants of one set of real processes: neither finds what the other has cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import redis

from kvern.client import Client, Finished, KvernError
from kvern.services.router.identity.api_keys import hash_of
from kvern.v1.inference_pb2 import Cache, GenerateRequest, Stopping
from kvern.v1.replica_pb2 import REPLICA_STATE_DRAINING, REPLICA_STATE_READY
from tests.up_process import UpProcess, run_kvern, wait_until

from .fleet import BUDGET

PROMPT = "A quern is a simple mill for grinding grain by hand. " * 8
KEYS = {"acme": "user", "other": "user", "spy": "admin", "acme-ops": "admin"}
"""Keys by name, `key of NAME`, and their roles."""

TENANTS = """
tenants:
  acme: {max_concurrent: 8, tokens_per_minute: 10000}
  other: {}
  spy: {}
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    folder = tmp_path_factory.mktemp("tenants")
    entries = (
        f"- {{id: {name}, tenant: {name.removesuffix('-ops')}, roles: [{role}], sha256: {hash_of(f'key of {name}')}}}"
        for name, role in KEYS.items()
    )
    contents = {"api-keys": "keys:\n" + "\n".join(entries), "tenants": TENANTS}
    contents |= {"salt-secret-file": "s" * 32, "digest-key-file": "d" * 32}
    flags = ["--replicas=2", "--max-model-len=256", "--num-blocks=128", "--num-threads=1", BUDGET]
    flags.append("--limit-budget-ms=5000")
    for flag, text in contents.items():
        (folder / flag).write_text(text)
        flags.append(f"--{flag}={folder / flag}")
    with UpProcess(folder, *flags) as up:
        up.wait_ready()
        yield up


def _client(up: UpProcess, name: str) -> Client:
    return Client(up.listen, api_key=f"key of {name}")


def _cached_tokens(up: UpProcess, name: str, salt: str = "") -> int:
    """Run a request that begins with the prompt, and return how much of it was cached."""
    request = GenerateRequest(text=PROMPT, stopping=Stopping(max_tokens=1), cache=Cache(salt=salt))
    with _client(up, name) as client:
        [finished] = [event for event in client.stream(request) if isinstance(event, Finished)]
    return finished.usage.cached_tokens


def _matched_tokens(up: UpProcess, name: str) -> int:
    """Return how much of the prompt the router believes to be cached anywhere, for a caller's tenant."""
    with _client(up, name) as client:
        return max(candidate.matched_tokens for candidate in client.route(PROMPT).candidates)


def _kvern(up: UpProcess, folder: Path, *arguments: str) -> str:
    """Run a command as an operator of acme's, and return what it prints."""
    key = folder / "key"
    key.write_text("key of acme-ops\n")
    ended = run_kvern(*arguments, f"--server={up.listen}", f"--api-key-file={key}")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_set_without_a_digest_key_for_its_tenants_does_not_start(tmp_path: Path) -> None:
    for name, text in (("tenants", TENANTS), ("secret", "s" * 32)):
        (tmp_path / name).write_text(text)
    ended = run_kvern("up", f"--tenants={tmp_path}/tenants", f"--salt-secret-file={tmp_path}/secret")
    assert ended.returncode == 2
    assert "digest_key_file: needed with tenants, as salt_secret_file is" in ended.stderr


def test_caller_without_a_key_is_refused(up: UpProcess) -> None:
    with Client(up.listen) as client, pytest.raises(KvernError) as refused:
        client.list_models()
    assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
    ended = run_kvern("models", f"--server={up.listen}", environ={"KVERN_API_KEY": "key of acme"})
    assert ended.returncode == 0, ended.stderr


def test_http_door_passes_on_whose_call_it_is(up: UpProcess) -> None:
    url = f"http://{up.http}/v1/models"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"authorization": "Bearer no key"}).status_code == 401
    assert httpx.get(url, headers={"authorization": "Bearer key of acme"}).json()["data"]


def test_tenant_finds_its_own_cached_prompts_and_nobody_elses(up: UpProcess) -> None:
    for salt in ("", "of the client"):
        assert _cached_tokens(up, "acme", salt) == 0
        # At another replica it would compute it anew, unless the index leads it to the one that has it.
        wait_until(lambda salt=salt: _cached_tokens(up, "acme", salt) > 64, "the tenant hits its own prompt")  # type: ignore[misc]
        assert _cached_tokens(up, "other", salt) == 0


def test_index_under_the_secret_key_answers_for_one_tenant_alone(up: UpProcess) -> None:
    _cached_tokens(up, "acme")
    wait_until(lambda: _matched_tokens(up, "acme-ops") > 64, "the index knows the prompt")
    with Client(up.listen, api_key="key of spy") as client:
        assert {candidate.matched_tokens for candidate in client.route(PROMPT).candidates} == {0}


def test_redis_holds_no_tenants_name(up: UpProcess) -> None:
    seen: set[str] = set()

    def counts_tokens() -> bool:
        _cached_tokens(up, "acme")
        seen.update(key.decode() for key in client.scan_iter())
        return any(key.startswith("kvern:limits:") for key in seen)

    with redis.Redis(unix_socket_path=str(up.sockets / "redis.sock")) as client:
        wait_until(counts_tokens, "the limits' keys are there")
    assert not any("acme" in key for key in seen)


def test_operator_resets_the_cache_and_the_tenant_starts_anew(up: UpProcess, tmp_path: Path) -> None:
    _cached_tokens(up, "acme")
    with _client(up, "acme") as client:
        [model] = client.list_models().models
    assert _kvern(up, tmp_path, "reset-cache", f"--model={model.name}").count(": reset") == 2
    assert _cached_tokens(up, "acme") == 0


def test_operator_drains_a_replica_and_takes_it_back(up: UpProcess, tmp_path: Path) -> None:
    with _client(up, "acme-ops") as client:
        name = client.list_replicas().replicas[0].address
        assert "draining" in _kvern(up, tmp_path, "drain", name)
        assert client.list_replicas().replicas[0].state == REPLICA_STATE_DRAINING
        with _client(up, "acme") as tenant:
            assert [model.ready_replicas for model in tenant.list_models().models] == [1]
        assert "ready" in _kvern(up, tmp_path, "drain", "--undo", name)
        assert client.list_replicas().replicas[0].state == REPLICA_STATE_READY
