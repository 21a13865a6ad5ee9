"""Dockerfile and compose files: what can be said of them without building an image."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import constraints
import pytest
import yaml

import kvern
from kvern.services.engine.settings import EngineSettings
from kvern.supervisor.launch import SERVICES
from tests import dockerfile
from tests.dockerfile import ROOT

TARGETS = ("services", "engine-cpu", "engine-gpu")
CACHE = "/var/cache/kvern"
WITHOUT_ENGINE = ("router", "tokenizer", "detokenizer", "gateway")


@pytest.mark.parametrize("target", TARGETS)
def test_target_runs_as_no_root_and_caches_in_the_writable_volume(target: str) -> None:
    every = dockerfile.stages()
    stage = every[target]
    users = list(stage.all("USER"))
    while stage.base in every:
        stage = every[stage.base]
        users = stage.all("USER") + users
    environment = dockerfile.environment(target)
    assert users[-1] == "10001:10001"
    assert environment["HOME"] == CACHE
    for name in ("XDG_CACHE_HOME", "HF_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert environment[name].startswith(CACHE)


def test_every_copied_path_exists_and_reaches_the_builder() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for stage in dockerfile.stages().values():
        for text in stage.all("COPY"):
            *sources, _ = text.split()
            if not sources[0].startswith("--from="):
                assert all((ROOT / source).exists() for source in sources)
                assert {Path(source).parts[0] for source in sources} <= kept


def test_every_stage_named_elsewhere_exists() -> None:
    every = dockerfile.stages()
    named = {
        name for stage in every.values() for text in stage.all("COPY") for name in re.findall("--from=(\\S+)", text)
    }
    bases = {stage.base for stage in every.values()} - {"${PYTHON_IMAGE}"}
    assert named | bases | set(TARGETS) <= every.keys()


def test_services_of_the_image_without_torch_start(tmp_path: Path) -> None:
    """With the packages of the extra that this image installs, and no others."""
    (tmp_path / "kvern").symlink_to(Path(kvern.__file__).parent)
    for name in constraints.needed_by("kvern", "services") - {"kvern"}:
        distribution = importlib.metadata.distribution(name)
        for top in {Path(str(file)).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(Path(str(distribution.locate_file(top))))
    modules = ", ".join(f"kvern.services.{name}.__main__" for name in WITHOUT_ENGINE)
    program = f"import sys, {modules}; assert 'torch' not in sys.modules"
    # -S: nothing of this environment's site-packages.
    environment = {"PYTHONPATH": str(tmp_path), **dockerfile.environment("services"), "HOME": str(tmp_path)}
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def _compose(name: str) -> dict[str, Any]:
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / name).read_text())
    return yaml.safe_load(text)["services"]


COMPOSE = _compose("compose.yaml")


@pytest.mark.parametrize("name", SERVICES)
def test_composed_service_understands_its_flags_and_is_probed_where_it_answers(name: str) -> None:
    service = COMPOSE[name]
    *python, module = service["command"][:4]
    assert (python, module) == (["python", "-P", "-m"], f"kvern.services.{name}")
    settings = SERVICES[name].load(service["command"][4:], prog=name, environ={})
    assert f"{settings.status_listen}/readyz".replace("0.0.0.0", "127.0.0.1") in service["healthcheck"]["test"][-1]
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert settings.drain_delay_s + settings.drain_timeout_s < grace_s
    ports = [port.rpartition(":")[2] for port in service.get("ports", ())]
    assert all(any(address.endswith(f":{port}") for address in settings.listen) for port in ports)


def test_composed_services_find_each_other() -> None:
    settings = {name: SERVICES[name].load(COMPOSE[name]["command"][4:], prog=name, environ={}) for name in SERVICES}
    engine = settings["engine"]
    assert isinstance(engine, EngineSettings)
    sockets = {(_volume(COMPOSE[name], "/run/kvern"), each) for name in SERVICES for each in settings[name].listen}
    calls = {"router": "tokenizer", "gateway": "router", "detokenizer": "engine"}
    for caller, callee in calls.items():
        assert (_volume(COMPOSE[caller], "/run/kvern"), getattr(settings[caller], callee)) in sockets
        assert callee in COMPOSE[caller]["depends_on"]
    assert engine.advertise == settings["router"].replicas[0] == "detokenizer:50051"
    assert engine.redis == settings["router"].redis == "redis://redis:6379"


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_composed_image_is_a_target(name: str) -> None:
    built = [service for service in _compose(name).values() if "build" in service]
    assert built
    assert all(service["image"] == f"kvern-{service['build']['target']}" for service in built)
    assert {service["build"]["target"] for service in built} <= set(TARGETS)


def _volume(service: dict[str, Any], target: str) -> str:
    [source] = [each.partition(":")[0] for each in service["volumes"] if each.split(":")[1] == target]
    return source
