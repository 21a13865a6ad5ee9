"""/metrics, /healthz and /readyz over a real socket."""

from __future__ import annotations

import socket

import httpx
import pytest
from prometheus_client import Counter

from kvern.services.runtime.listen import ListenError
from kvern.services.runtime.metrics import LATENCY_BUCKETS_S, OTHER, ModelLabel
from kvern.services.runtime.status import Status
from tests.up_process import free_port


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


async def get(address: str, path: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(f"http://{address}{path}", headers=headers)


async def test_metrics_keep_colons_whatever_the_scraper_accepts(address: str) -> None:
    status = Status("test")
    Counter("vllm:things", "Things.", registry=status.registry).inc()
    async with status.serving(address):
        answer = await get(address, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "vllm:things_total 1.0" in answer.text
    assert "_created" not in answer.text


async def test_metrics_tell_of_the_process_and_its_version(address: str) -> None:
    async with Status("test").serving(address):
        text = (await get(address, "/metrics")).text
    assert "process_resident_memory_bytes" in text
    assert 'kvern_build_info{service="test"' in text


async def test_readyz_follows_readiness(address: str) -> None:
    status = Status("test")
    async with status.serving(address):
        assert (await get(address, "/readyz")).status_code == 503
        status.is_ready = True
        assert (await get(address, "/readyz")).status_code == 200


async def test_healthz_names_the_trouble_and_does_not_mind_unreadiness(address: str) -> None:
    """G01, G03: a process that loads is alive and not ready."""
    status = Status("test")
    async with status.serving(address):
        assert (await get(address, "/healthz")).status_code == 200
        status.find_trouble = lambda: "stuck"
        answer = await get(address, "/healthz")
    assert (answer.status_code, answer.text) == (503, "stuck\n")


async def test_a_taken_port_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=address):
            async with Status("test").serving(address):
                pass


def test_model_labels_are_bounded_by_what_is_served() -> None:
    """H08."""
    label = ModelLabel(lambda: {"a"})
    assert [label("a"), label(""), label("anything")] == ["a", "a", OTHER]
    assert ModelLabel(lambda: {"a", "b"})("") == OTHER


def test_latency_buckets_reach_from_a_millisecond_to_minutes() -> None:
    """H05."""
    assert LATENCY_BUCKETS_S[0] == 0.001
    assert LATENCY_BUCKETS_S[-1] >= 300
