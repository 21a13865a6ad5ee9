"""/metrics, /healthz and /readyz over a real socket."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx
import pytest
from prometheus_client import Counter

from kvern.services.runtime.listen import ListenError
from kvern.services.runtime.metrics import LATENCY_BUCKETS_S, OTHER, ModelLabel
from kvern.services.runtime.status import Status
from tests.up_process import PATIENCE_S, free_port


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


async def get(address: str, path: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
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


async def test_readyz_and_its_metric_follow_readiness(address: str) -> None:
    status = Status("test")
    async with status.serving(address):
        assert (await get(address, "/readyz")).status_code == 503
        assert "kvern_ready 0.0" in (await get(address, "/metrics")).text
        status.is_ready = True
        assert (await get(address, "/readyz")).status_code == 200
        assert "kvern_ready 1.0" in (await get(address, "/metrics")).text


async def test_loop_that_stands_still_shows_in_its_lag(address: str) -> None:
    status = Status("test")
    registry = status.registry
    async with status.serving(address), asyncio.timeout(20):
        await asyncio.sleep(0)  # the sampler has begun
        num_samples = registry.get_sample_value("kvern_event_loop_lag_seconds_count")
        time.sleep(1)  # noqa: ASYNC251  # that is what it is to find
        while registry.get_sample_value("kvern_event_loop_lag_seconds_count") == num_samples:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (registry.get_sample_value("kvern_event_loop_lag_seconds_sum") or 0.0) >= 0.4


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


async def test_error_of_the_service_passes_through_as_it_is(address: str) -> None:
    """The process ends with one line for it, not with a traceback of groups."""
    with pytest.raises(ListenError, match="taken"):
        async with Status("test").serving(address):
            raise ListenError("taken")


def test_model_labels_are_bounded_by_what_is_served() -> None:
    """H08."""
    label = ModelLabel(lambda: {"a"})
    assert [label("a"), label(""), label("anything")] == ["a", "a", OTHER]
    assert ModelLabel(lambda: {"a", "b"})("") == OTHER


def test_latency_buckets_reach_from_a_millisecond_to_minutes() -> None:
    """H05."""
    assert LATENCY_BUCKETS_S[0] == 0.001
    assert LATENCY_BUCKETS_S[-1] >= 300
