"""What docs/operations.md tells people to write."""

from __future__ import annotations

import re

import pytest
import yaml

from kvern.services.gateway.client_watch import MAX_BODY_BYTES
from kvern.services.router.identity.api_keys import ApiKeys
from kvern.services.router.identity.tenants import Tenants
from tests.helm.chart import CHART, SETTINGS, of_kind, render
from tests.helm.schemas import trouble
from tests.helm.test_documents import VERSIONS

OPERATIONS = (CHART.parent.parent / "docs" / "operations.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## \d+\. {title}\n(.*?)(?=^## )", OPERATIONS, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


VALUES, INGRESS, KEYS, TENANTS = re.findall(r"^```yaml\n(.*?)^```", OPERATIONS, re.MULTILINE | re.DOTALL)


def test_example_values_render() -> None:
    documents = render(yaml.safe_load(VALUES))
    assert of_kind(documents, "PodMonitor", "PrometheusRule")
    assert 'model="llama-3.1-8b"' in str(of_kind(documents, "PrometheusRule"))


@pytest.mark.parametrize("version", VERSIONS)
def test_example_ingress_leads_to_the_gateway(version: str) -> None:
    ingress = yaml.safe_load(INGRESS)
    assert trouble(ingress, version) == []
    [rule] = ingress["spec"]["rules"]
    [path] = rule["http"]["paths"]
    services = of_kind(render({"gateway": {"enabled": True}}), "Service")
    [gateway] = [each for each in services if each["metadata"]["name"] == path["backend"]["service"]["name"]]
    assert path["backend"]["service"]["port"]["name"] in [port["name"] for port in gateway["spec"]["ports"]]
    annotations = ingress["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-body-size"] == f"{MAX_BODY_BYTES >> 20}m"


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
