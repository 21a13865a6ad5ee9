"""Which processes make a set, and how they are connected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvern.services.runtime.settings import SettingsError
from kvern.supervisor.addresses import Address
from kvern.supervisor.launch import SetOptions, Value, prepare
from kvern.supervisor.process import ProcessSpec


def _specs(
    folder: Path, replicas: int, environ: dict[str, str] | None = None, settings: Mapping[str, Value] = {}
) -> dict[str, ProcessSpec]:
    options = SetOptions(Address("127.0.0.1", 50051), Address("127.0.0.1", 8000), replicas, settings)
    return {spec.name: spec for spec in prepare(options, folder, environ or {}).specs}


def test_one_replica_needs_no_index(tmp_path: Path) -> None:
    specs = _specs(tmp_path, 1)
    assert list(specs) == ["tokenizer", "engine-0", "detokenizer-0", "router", "gateway"]
    assert not any("redis" in flag for spec in specs.values() for flag in spec.flags)


def test_several_replicas_share_a_private_redis_and_the_router_is_told_of_them_as_well(tmp_path: Path) -> None:
    specs = _specs(tmp_path, 2)
    assert specs["redis"].flags == [f"--socket={tmp_path}/redis.sock"]
    redis, doors = f"--redis=unix://{tmp_path}/redis.sock", [f"unix:{tmp_path}/detokenizer-{i}.sock" for i in range(2)]
    for index, door in enumerate(doors):
        assert {redis, f"--advertise={door}"} <= set(specs[f"engine-{index}"].flags)
    assert {redis, f"--replicas={','.join(doors)}"} <= set(specs["router"].flags)


@pytest.mark.parametrize("variable", ["KVERN_REDIS", "KVERN_ADVERTISE", "KVERN_REPLICA_ID"])
def test_variable_that_would_connect_it_otherwise_is_refused(tmp_path: Path, variable: str) -> None:
    with pytest.raises(SettingsError, match=f"{variable}: kvern up connects its services itself"):
        _specs(tmp_path, 2, {variable: "redis://elsewhere"})


@pytest.mark.parametrize("by_variable", [True, False])
def test_replicas_have_smg_ports_of_their_own_and_engines_tell_what_is_cached(
    tmp_path: Path, by_variable: bool
) -> None:
    address = "127.0.0.1:50060"
    events: dict[str, Value] = {"smg_kv_events": True, "smg_salt": "gate"}
    if by_variable:
        specs = _specs(tmp_path, 2, {"KVERN_SMG_LISTEN": address}, events)
    else:
        specs = _specs(tmp_path, 2, None, {"smg_listen": address, **events})
    for index in range(2):
        detokenizer, engine = specs[f"detokenizer-{index}"].flags, specs[f"engine-{index}"].flags
        assert [flag for flag in detokenizer if "smg-listen" in flag] == [f"--smg-listen=127.0.0.1:{50060 + index}"]
        assert {"--smg-kv-events", "--smg-salt=gate"} <= set(detokenizer) & set(engine)


def test_events_without_a_port_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"smg_kv_events: .*needs smg_listen"):
        _specs(tmp_path, 1, None, {"smg_kv_events": True})
