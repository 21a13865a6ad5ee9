"""Values: what the schema takes and refuses, and that Helm finds nothing to say of the chart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest

from kvern.version import __version__
from tests.helm.chart import CHART, SETTINGS, VALUES, deployment, load, render, rendered, service, services, values

SCHEMA: dict[str, Any] = load().schema or {}
DEFINITIONS = SCHEMA["$defs"]

NOT_IN_PODS = {
    "router": set(),
    "tokenizer": {"tls-ca", "tls-client-ca"},
    "detokenizer": {"tls-ca"},
    "engine": {"tls-ca", "tls-client-ca"},
    "gateway": {"tls-ca"},
}
"""Of services that call, or are called, over the Unix sockets of their pods alone."""


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    return DEFINITIONS[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def paths(tree: dict[str, Any], at: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{at}.{key}"
        if isinstance(value, dict):
            yield from paths(value, f"{at}.{key}")


def schema_paths(schema: dict[str, Any], at: str = "") -> Iterator[str]:
    for key, value in resolved(schema).get("properties", {}).items():
        yield f"{at}.{key}"
        if not key.endswith("ettings"):
            yield from schema_paths(value, f"{at}.{key}")


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(helm_python.HelmError) as error:
        render(given)
    return str(error.value)


@pytest.mark.parametrize("name", VALUES)
def test_lint_finds_nothing(name: str) -> None:
    report = helm_python.lint(CHART, values(name), strict=True)
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert not report["errors"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"replicaCount": 2}, "replicaCount"),
        ({"router": {"replica": 2}}, "replica"),
        ({"pools": {"a": {"gpus": 1}}}, "gpus"),
        ({"pools": {"Big Pool": {}}}, "Big Pool"),
        ({"replica": {"engine": {"settings": {"max-num-seq": 2}}}}, "max-num-seq"),
        ({"replica": {"engine": {"settings": {"listen": "0.0.0.0:1"}}}}, "listen"),
        ({"replica": {"engine": {"shm": "1G"}}}, "shm"),
        ({"replica": {"model": {"source": "s3"}}}, "source"),
        ({"redis": {"external": {"url": "redis://:password@redis:6379"}}}, "url"),
        ({"redis": {"mode": "external"}}, "redis.external"),
        ({"replica": {"model": {"source": "pvc", "name": "m"}}}, "claimName"),
        ({"replica": {"model": {"source": "hub"}}}, "model.hub.id"),
        ({"replica": {"model": {"source": "image", "image": {"reference": "models:1"}}}}, "model.name"),
        ({"replica": {"autoscaling": {"kind": "hpa", "minReplicas": 0}}}, "minReplicas"),
        ({"replica": {"engine": {"resources": {"limits": {"cpu": None}}}}}, "resources.limits.cpu"),
        ({"replica": {"podLabels": {"app.kubernetes.io/name": "other"}}}, "app.kubernetes.io/name"),
        ({"inferencePool": {"enabled": True}, "replica": {"smg": {"enabled": True}}}, "endpointPicker.name"),
        ({"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}}, "smg.enabled"),
        ({"tls": {"enabled": True, "router": {"secret": "router"}}}, "tls.replica.secret"),
        ({"tls": {"clientCa": {"name": "clients"}}}, "tls.enabled"),
        ({"auth": {"jwt": {"audience": "kvern", "jwks": "https://issuer/keys"}}}, "auth.jwt.issuer"),
        ({"auth": {"jwt": {"issuer": "https://issuer", "jwks": "https://issuer/keys"}}}, "auth.jwt.audience"),
        ({"auth": {"jwt": {"issuer": "https://issuer", "audience": "kvern"}}}, "auth.jwt.jwks"),
        ({"auth": {"saltSecret": {"name": "salt"}}}, "auth.tenants.name"),
        ({"replica": {"smg": {"enabled": True, "port": 50051}}}, "pool default: smg.port"),
        ({"replica": {"smg": {"enabled": True, "port": 80}}}, "smg/port"),
        ({"replica": {"autoscaling": {"kind": "keda", "minReplicas": 5}}}, "kvern-replica-default: autoscaling.min"),
        ({"replica": {"autoscaling": {"kind": "hpa", "minReplicas": 5}}}, "kvern-replica-default: autoscaling.min"),
        ({"router": {"autoscaling": {"kind": "hpa", "minReplicas": 9}}}, "kvern-router: autoscaling.minReplicas"),
        (
            {"redis": {"auth": {"secret": "s"}, "mode": "external", "external": {"secret": {"name": "u"}}}},
            "auth.secret",
        ),
    ],
)
def test_value_that_is_wrong_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    assert named in refusal(given)


def test_two_autoscaled_pools_of_one_model_are_refused() -> None:
    pool = {"autoscaling": {"kind": "keda"}}
    assert "pools a and b" in refusal({"pools": {"a": pool, "b": pool}})


def test_hpa_for_a_model_whose_name_is_no_label_value_is_refused() -> None:
    model = {"source": "hub", "hub": {"id": "owner/name"}}
    assert "owner/name" in refusal({"replica": {"model": model, "autoscaling": {"kind": "hpa"}}})


def test_pod_monitor_and_service_monitor_together_are_refused() -> None:
    on = {"enabled": True}
    assert "twice" in refusal({"observability": {"podMonitor": on, "serviceMonitor": on}})


def test_schema_is_closed_wherever_it_names_keys() -> None:
    def open_ones(schema: Any, at: str) -> Iterator[str]:
        if isinstance(schema, dict):
            if "properties" in schema and schema.get("additionalProperties", True) is True:
                yield at
            for key, value in schema.items():
                yield from open_ones(value, f"{at}/{key}")

    assert list(open_ones(SCHEMA, "")) == []


def test_values_file_shows_every_key_of_the_schema() -> None:
    assert set(schema_paths(SCHEMA)) - set(paths(load().values)) <= {".global"}


@pytest.mark.parametrize("of", SETTINGS)
def test_settings_that_the_schema_takes_are_all_that_the_chart_does_not_give_itself(of: str) -> None:
    own = {"config", "supervisor-pid"}
    for name in VALUES:
        given = {key for path in paths(values(name)) if ".settings." in path for key in [path.rpartition(".")[2]]}
        flags = [container.flags for container in services(rendered(name)) if container.service == of]
        own |= {flag.removeprefix("no-") for each in flags for flag in each} - given
    known = {field.replace("_", "-") for field in SETTINGS[of].model_fields}
    # Redis comes as a variable, as it may hold a password.
    assert set(DEFINITIONS[f"{of}Settings"]["properties"]) == known - own - {"redis"} - NOT_IN_PODS[of]


def test_pools_keys_are_those_of_replica() -> None:
    properties = SCHEMA["properties"]
    assert properties["pools"]["additionalProperties"] == properties["replica"]


def test_pool_overrides_what_replica_says_with_nothing_too() -> None:
    replica = {"gpu": {"count": 1}, "rollout": {"spareGpus": True}, "engine": {"settings": {"seed": 1}, "shm": "1Gi"}}
    pool = {"gpu": {"count": 0}, "rollout": {"spareGpus": False}, "replicas": 0, "engine": {"settings": {"seed": 0}}}
    documents = render({"replica": replica, "pools": {"a": pool}})
    spec = deployment(documents, "replica")["spec"]
    assert (spec["replicas"], spec["strategy"]["rollingUpdate"]["maxSurge"]) == (0, 0)
    settings = service(documents, "engine").settings()
    assert (settings.device, settings.seed) == ("cpu", 0)
    [shm] = [each for each in spec["template"]["spec"]["volumes"] if each["name"] == "shm"]
    assert shm["emptyDir"]["sizeLimit"] == "1Gi"


def test_chart_asks_for_images_of_this_version() -> None:
    assert load().metadata["appVersion"] == __version__


def test_templates_depend_on_nothing_but_values() -> None:
    """A chart is rendered by tools that see no cluster, and twice the same."""
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert re.findall(r"\.Capabilities|\blookup\b|\brand\w*|uuidv4|\bnow\b|gen\w*(?:Cert|CA|Key)", _actions(text)) == []


def _actions(text: str) -> str:
    return "\n".join(re.findall(r"\{\{-?(?!\s*/\*)(.*?)-?\}\}", text, re.DOTALL))
