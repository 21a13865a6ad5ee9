"""What a process tells at /metrics, as a scraper reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.up_process import PATIENCE_S, free_port

EVERY_SERVICE = {
    "process_cpu_seconds_total",
    "python_gc_collections_total",
    "kvern_build_info",
    "kvern_ready",
    "kvern_event_loop_lag_seconds",
}
GRPC_SERVICE = EVERY_SERVICE | {"kvern_rpc_requests_total", "kvern_rpc_duration_seconds"}


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""By name and labels."""


class Scrape:
    """One answer of /metrics."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: dict[str, Metric] = {}
        """By name, a counter's with its `_total`."""
        for family in text_string_to_metric_families(text):
            self.families[family.name + "_total" * (family.type == "counter")] = family

    def __call__(self, name: str, **labels: str) -> float:
        """Return the sum of a name's samples with these labels, 0 where there are none."""
        return sum(
            value for (each, having), value in self.samples.items() if each == name and labels.items() <= set(having)
        )

    @property
    def samples(self) -> Samples:
        return {key: value for family in self.families.values() for key, value in self.samples_of(family).items()}

    @staticmethod
    def samples_of(family: Metric) -> Samples:
        return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in family.samples}

    def assert_has(self, names: set[str], absent: Set[str] = frozenset()) -> None:
        """These metrics are told of, each with its help, and none that is nobody's."""
        assert names - self.families.keys() == set()
        assert not absent & self.families.keys()
        assert [name for name, family in self.families.items() if not family.documentation] == []
        assert {name.split("_")[0] for name in self.families} <= {"kvern", "process", "python"}


def status_address() -> str:
    return f"127.0.0.1:{free_port()}"


async def scrape(address: str) -> Scrape:
    """Ask once, and be sure that it is text of the old format whatever is asked for."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.get(f"http://{address}/metrics", headers={"accept": "application/openmetrics-text"})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(answer.text)


async def scrape_until(address: str, is_right: Callable[[Scrape], bool]) -> Scrape:
    """Ask until the answer is right: what a call counts at its end may come after its client has seen that."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_right(await scrape(address)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    # Once more: an answer is put together while things go on, so that one has its beginning from before.
    return await scrape(address)
