"""`kvern download`, against a hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.hub import MODEL, serving_hub
from tests.up_process import run_kvern


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with serving_hub() as url:
        yield url


@pytest.mark.parametrize(
    ("flags", "files"),
    [
        ((), {"config.json", "tokenizer.json", "model.safetensors"}),
        (("--tokenizer-only",), {"config.json", "tokenizer.json"}),
    ],
)
def test_download_fetches_what_services_then_find_without_the_hub(
    hub: str, tmp_path: Path, flags: tuple[str, ...], files: set[str]
) -> None:
    fetched = run_kvern("download", MODEL, *flags, environ={"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)})
    assert fetched.returncode == 0, fetched.stderr
    assert {path.name for path in Path(fetched.stdout.strip()).iterdir()} == files
    for wanted in {flags, ("--tokenizer-only",)}:
        offline = run_kvern("download", MODEL, *wanted, environ={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
        assert (offline.returncode, offline.stdout) == (0, fetched.stdout)


def test_download_of_what_the_hub_does_not_show_names_the_token(hub: str, tmp_path: Path) -> None:
    done = run_kvern("download", "millers/secret", environ={"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert "HF_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr


def test_download_without_network_says_so(tmp_path: Path) -> None:
    done = run_kvern("download", MODEL, environ={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == f"Error: model: {MODEL} is not in the hub cache, and the hub is out of reach or off\n"


def test_download_of_a_local_model_checks_it(smollm2_path: Path, tmp_path: Path) -> None:
    assert run_kvern("download", str(smollm2_path)).stdout == f"{smollm2_path}\n"
    for wrong, why in ((str(tmp_path / "none"), "no folder or file"), ("x" * 300, "File name too long")):
        done = run_kvern("download", wrong)
        assert (done.returncode, why in done.stderr, "Traceback" in done.stderr) == (1, True, False)
