"""A live set's metrics, for all tests of what dashboards and alerts ask."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvern.client import Client, KvernError
from kvern.services.router.identity.jwks import Jwks, tell_age
from kvern.services.runtime.certificates import watch_certificates
from kvern.services.runtime.metrics import render
from tests.helm.promql import Exposed
from tests.up_process import PATIENCE_S, UpProcess, first_free_port, wait_until

_NUM_SERVICES = 7
"""Tokenizer, two engines and their detokenizers, router, gateway."""

_PROMPT = "A quern is a hand mill: two stones, of which the upper one turns. It grinds grain to flour."


@pytest.fixture(scope="session")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Exposed:
    """All series of a set with an index that has had some requests, and those of a certificate and of tokens."""
    folder = tmp_path_factory.mktemp("exposed")
    texts = [*_live_texts(folder), _certificate_text(folder), _tokens_text(folder)]
    series = defaultdict(list)
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series[sample.name].append(sample.labels)
    return series


def _live_texts(folder: Path) -> list[str]:
    first = first_free_port(_NUM_SERVICES)
    flags = (f"--status-listen=127.0.0.1:{first}", "--replicas=2", "--num-threads=1")
    with UpProcess(folder, *flags, "--max-model-len=128", "--num-blocks=16") as up:
        up.wait_ready()
        _ask(up)
        urls = [f"http://127.0.0.1:{first + place}/metrics" for place in range(_NUM_SERVICES)]
        return [httpx.get(url, timeout=PATIENCE_S).raise_for_status().text for url in urls]


def _ask(up: UpProcess) -> None:
    """Send what leaves a mark in each service: a prompt twice, a wrong one, and a chat over HTTP."""
    with Client(up.listen) as client:
        wait_until(lambda: all(replica.registered for replica in client.list_replicas().replicas), "all are registered")
        for _ in range(2):
            list(client.generate(_PROMPT, max_tokens=2))
        with suppress(KvernError):
            list(client.generate(_PROMPT, temperature=-1))
    question = {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 2}
    httpx.post(f"http://{up.http}/v1/chat/completions", json=question, timeout=PATIENCE_S).raise_for_status()


def _certificate_text(folder: Path) -> str:
    """Return what a process tells that uses a certificate."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "this test makes its certificate with the openssl command"
    certificate = folder / "certificate.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=127.0.0.1", "-days", "1", "-keyout", "/dev/null", "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    registry = CollectorRegistry()
    watch_certificates(registry, [str(certificate)])
    return render(registry).decode()


def _tokens_text(folder: Path) -> str:
    """Return what a router tells that takes tokens."""
    registry = CollectorRegistry()
    tell_age(registry, Jwks(str(folder / "jwks.json")))
    return render(registry).decode()
