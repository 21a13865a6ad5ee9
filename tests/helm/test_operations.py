"""What docs/operations.md tells people to write."""

from __future__ import annotations

import re

import yaml

from kvern.services.router.identity.api_keys import ApiKeys
from kvern.services.router.identity.tenants import Tenants
from tests.helm.chart import CHART, SETTINGS, of_kind, render

OPERATIONS = (CHART.parent.parent / "docs" / "operations.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## \d+\. {title}\n(.*?)(?=^## )", OPERATIONS, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


VALUES, KEYS, TENANTS = re.findall(r"^```yaml\n(.*?)^```", OPERATIONS, re.MULTILINE | re.DOTALL)


def test_example_values_render() -> None:
    documents = render(yaml.safe_load(VALUES))
    assert of_kind(documents, "PodMonitor", "PrometheusRule")
    assert 'model="llama-3.1-8b"' in str(of_kind(documents, "PrometheusRule"))


def test_example_files_of_keys_and_tenants_are_read() -> None:
    ApiKeys.parse(KEYS.encode())
    assert Tenants.parse(TENANTS.encode()).policy_of("acme").max_concurrent == 32


def test_flags_of_the_tuning_table_exist() -> None:
    flags = {flag for row in section("Tune").splitlines() if row.startswith("| ") for flag in _flags(row)}
    known = {name.replace("_", "-") for settings in SETTINGS.values() for name in settings.model_fields}
    assert len(flags) > 8
    assert flags <= known


def _flags(row: str) -> list[str]:
    change = row.split("|")[-2]
    return [flag for flag in re.findall(r"`([a-z-]+)(?:: \w+)?`", change) if "-" in flag and "least" not in flag]
