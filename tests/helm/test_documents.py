"""Documents: valid for Kubernetes, their own in a namespace, and selecting what they mean."""

from __future__ import annotations

import re

import prometheus_client
import pytest

from kvern.cli.generate import generate
from kvern.services.router.admission import Admission
from kvern.services.router.metrics import RouterMetrics
from kvern.services.router.view import show_streams
from tests.helm.chart import (
    NAMESPACE,
    VALUES,
    Document,
    all_containers,
    component,
    containers,
    labels_of,
    of_kind,
    pods,
    render,
    render_files,
    rendered,
    selects,
    services,
    values,
)
from tests.helm.schemas import is_custom, trouble

VERSIONS = ("1.31", "1.36")
"""The oldest that knows volumes of OCI images, and a new one."""

LONG = "a-release-whose-name-is-as-long-as-helm-lets-it-be-"
RELEASES = ("kvern", "a", "a-kvern", "kvern-kvern", "a-router", "kvern-replica", f"{LONG}1", f"{LONG}2")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", VALUES)
def test_document_is_valid(name: str, version: str) -> None:
    assert [error for document in rendered(name) for error in trouble(document, version)] == []


def test_custom_resources_are_all_rendered_somewhere() -> None:
    kinds = {document["kind"] for name in VALUES for document in rendered(name) if is_custom(document)}
    assert kinds == {"PodMonitor", "ServiceMonitor", "PrometheusRule", "ScaledObject", "InferencePool"}


@pytest.mark.parametrize("version", VERSIONS)
def test_schemas_refuse_what_they_do_not_know(version: str) -> None:
    for document in (*rendered("everything"), *rendered("keda"), *rendered("service_monitor")):
        if "spec" in document:
            wrong = document | {"spec": document["spec"] | {"replicaCount": 1}}
            assert any("replicaCount" in error for error in trouble(wrong, version)), document["kind"]


@pytest.mark.parametrize("name", ["everything", "two_models", "keda", "service_monitor"])
def test_names_of_two_releases_differ(name: str) -> None:
    """Field case G17."""
    given = {key: value for key, value in values(name).items() if key != "fullnameOverride"}
    names = [_names(render(given, release=release)) for release in RELEASES]
    together = [each for of_release in names for each in of_release]
    assert len(together) == len(set(together))


def _names(documents: list[Document]) -> list[tuple[str, str]]:
    return [(document["kind"], document["metadata"]["name"]) for document in documents]


@pytest.mark.parametrize("release", RELEASES)
def test_names_fit(release: str) -> None:
    pool = "a-pool-of-18-chars"
    documents = render({"pools": {pool: {}}, "observability": {"serviceMonitor": {"enabled": True}}}, release=release)
    names = [name for _, name in _names(documents)]
    assert max(map(len, names)) <= 63
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) for name in names)


def test_selectors_stay_the_same_when_the_chart_and_its_values_change() -> None:
    before, after = rendered("minimal"), render({"commonLabels": {"team": "x"}, "images": {"services": {"tag": "9"}}})
    for old, new in zip(of_kind(before, "Deployment"), of_kind(after, "Deployment"), strict=True):
        assert old["spec"]["selector"] == new["spec"]["selector"]
        assert not any("version" in key or "chart" in key for key in new["spec"]["selector"]["matchLabels"])


@pytest.mark.parametrize("name", VALUES)
def test_deployment_selects_its_own_pods_only(name: str) -> None:
    documents = rendered(name)
    for each in of_kind(documents, "Deployment"):
        selector = each["spec"]["selector"]["matchLabels"]
        assert [pod for pod in pods(documents) if selects(selector, pod)] == [each["spec"]["template"]]


@pytest.mark.parametrize("name", VALUES)
def test_service_leads_to_ports_that_its_pods_have(name: str) -> None:
    documents = rendered(name)
    for each in of_kind(documents, "Service"):
        chosen = [pod for pod in pods(documents) if selects(each["spec"]["selector"], pod)]
        assert chosen, each["metadata"]["name"]
        offered = [{port for c in containers(pod) for port in c.ports.items()} for pod in chosen]
        for port in each["spec"]["ports"]:
            found = [number for ports in offered for named, number in ports if port["targetPort"] in (named, number)]
            assert found, port
            assert each["spec"].get("clusterIP") != "None" or {*found} == {port["port"]}


def test_client_services_lead_to_routers_and_the_replicas_one_to_replicas_of_all_pools() -> None:
    documents = rendered("two_models")
    leads = {
        each["metadata"]["name"]: sorted(component(pod) for pod in pods(documents) if selects(_selector(each), pod))
        for each in of_kind(documents, "Service")
    }
    assert leads == {
        "kvern": ["router"],
        "kvern-headless": ["router"],
        "kvern-replicas": ["replica"] * 3,
        "kvern-redis": ["redis"],
    }


def _selector(service: Document) -> dict[str, str]:
    return service["spec"]["selector"]


@pytest.mark.parametrize(
    ("name", "protocol"), [("minimal", "kubernetes.io/h2c"), ("foreign_uid", None), ("everything", "grpc")]
)
def test_app_protocol_is_a_value(name: str, protocol: str | None) -> None:
    found = [
        port.get("appProtocol")
        for each in of_kind(rendered(name), "Service")
        for port in each["spec"]["ports"]
        if port["name"] == "grpc"
    ]
    assert found == [protocol] * 3


@pytest.mark.parametrize("name", VALUES)
def test_router_dials_the_replicas_service_under_its_name(name: str) -> None:
    documents = rendered(name)
    [router] = [container for container in services(documents) if container.service == "router"]
    [headless] = [each for each in of_kind(documents, "Service") if each["metadata"]["name"].endswith("-replicas")]
    settings = router.settings()
    assert settings.replicas == (f"dns:///{headless['metadata']['name']}:{headless['spec']['ports'][0]['port']}",)
    assert settings.replica_authority == f"{headless['metadata']['name']}.{NAMESPACE}.svc"
    assert headless["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("name", VALUES)
def test_disruption_budget_lets_one_pod_of_each_deployment_go_and_what_is_broken(name: str) -> None:
    documents = rendered(name)
    budgets = [each["spec"] for each in of_kind(documents, "PodDisruptionBudget")]
    guarded = [pod for each in budgets for pod in pods(documents) if selects(each["selector"]["matchLabels"], pod)]
    assert guarded == [pod for kind in ("replica", "router") for pod in pods(documents) if component(pod) == kind]
    for each in budgets:
        assert (each["maxUnavailable"], each["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


@pytest.mark.parametrize(("name", "kind"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_autoscaler_owns_the_replicas_of_what_it_scales(name: str, kind: str) -> None:
    documents = rendered(name)
    targets = {each["spec"]["scaleTargetRef"]["name"] for each in of_kind(documents, kind)}
    assert targets == {"kvern-router", "kvern-replica-default"}
    counts = {each["metadata"]["name"]: each["spec"].get("replicas") for each in of_kind(documents, "Deployment")}
    assert counts == {"kvern-router": None, "kvern-replica-default": None, "kvern-redis": 1}


def test_autoscalers_metrics_are_exported_by_routers_for_that_model() -> None:
    """Field case G16."""
    registry = prometheus_client.CollectorRegistry()
    RouterMetrics(registry).know(["llama"])
    show_streams(registry, Admission(1))
    exported = {sample.name: set(sample.labels) for metric in registry.collect() for sample in metric.samples}
    queries = [
        trigger["metadata"]["query"]
        for name in ("keda", "two_models")
        for each in of_kind(rendered(name), "ScaledObject")
        for trigger in each["spec"]["triggers"]
    ]
    [external] = [
        metric["external"]["metric"]
        for each in of_kind(rendered("hpa"), "HorizontalPodAutoscaler")
        for metric in each["spec"]["metrics"]
        if metric["type"] == "External"
    ]
    names = {*re.findall(r"kvern_\w+(?=\{)", " ".join(queries)), external["name"]}
    assert names == {"kvern_router_demand", "kvern_router_streams"}
    assert [exported[name] for name in sorted(names)] == [{"model"}, set()]
    assert external["selector"]["matchLabels"] == {"model": "smollm2"}
    assert any('model="llama"' in query for query in queries)


def test_autoscaler_counts_what_this_releases_monitor_labels_so() -> None:
    scaled = of_kind(rendered("keda", "other"), "ScaledObject")
    for query in (each["spec"]["triggers"][0]["metadata"]["query"] for each in scaled):
        assert dict(re.findall(r'(namespace|job)="([^"]+)"', query)) == {"namespace": NAMESPACE, "job": "other"}
    [monitor] = of_kind(rendered("everything", "other"), "PodMonitor")
    for pod in pods(rendered("keda", "other")):
        assert labels_of(pod)[monitor["spec"]["jobLabel"]] == "other"


@pytest.mark.parametrize("name", ["everything", "service_monitor"])
def test_monitor_scrapes_every_container_once_and_carries_its_labels(name: str) -> None:
    """Field case G15."""
    documents = rendered(name)
    [monitor] = of_kind(documents, "PodMonitor", "ServiceMonitor")
    label = {"PodMonitor": ("release", "prometheus"), "ServiceMonitor": ("team", "serving")}[monitor["kind"]]
    assert label in labels_of(monitor).items()
    scraped = sorted(_scraped(monitor, documents))
    assert scraped == sorted(container.settings().status_listen.rpartition(":")[2] for container in services(documents))


def _scraped(monitor: Document, documents: list[Document]) -> list[str]:
    spec = monitor["spec"]
    endpoints = spec.get("podMetricsEndpoints") or spec["endpoints"]
    selector = spec["selector"]["matchLabels"]
    targets = {each["port"]: each["port"] for each in endpoints}
    if monitor["kind"] == "ServiceMonitor":
        [service] = [each for each in of_kind(documents, "Service") if selector.items() <= labels_of(each).items()]
        assert targets.keys() == {port["name"] for port in service["spec"]["ports"]}
        targets = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
        selector = service["spec"]["selector"]
    return [
        port
        for pod in pods(documents)
        if selects(selector, pod)
        for endpoint in endpoints
        if not _drops(endpoint, pod)
        for port in _ports(pod, targets[endpoint["port"]])
    ]


def _drops(endpoint: Document, pod: Document) -> bool:
    label = "__meta_kubernetes_pod_label_app_kubernetes_io_component"
    return any(
        (rule["action"], rule["sourceLabels"], rule["regex"]) == ("drop", [label], component(pod))
        for rule in endpoint.get("relabelings", ())
    )


def _ports(pod: Document, target: str | int) -> list[str]:
    """Return what a port is at a pod. By number there is one at every pod, whether anybody listens or not."""
    if isinstance(target, int):
        return [str(target)]
    return [str(container.ports[target]) for container in containers(pod) if target in container.ports]


@pytest.mark.parametrize("name", VALUES)
def test_no_service_and_no_network_policy_names_a_port_of_a_native_sidecar(name: str) -> None:
    """Kubernetes before 1.32 and some networks do not look such names up."""
    documents = rendered(name)
    sidecars = [each for each in all_containers(documents) if each.spec.get("restartPolicy") == "Always"]
    named = {port["targetPort"] for each in of_kind(documents, "Service") for port in each["spec"]["ports"]}
    for policy in of_kind(documents, "NetworkPolicy"):
        named |= {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert not named & {port for sidecar in sidecars for port in sidecar.ports}


@pytest.mark.parametrize("name", [name for name in VALUES if name != "no_redis"])
def test_network_policy_opens_each_port_to_those_who_call_it(name: str) -> None:
    documents = rendered(name)
    for pod in pods(documents):
        [policy] = [each["spec"] for each in of_kind(documents, "NetworkPolicy") if _guards(each, pod)]
        numbers = {name: number for container in containers(pod) for name, number in container.ports.items()}
        rules = {
            numbers.get(port["port"], port["port"]): rule.get("from")
            for rule in policy["ingress"]
            for port in rule["ports"]
        }
        assert rules.keys() == set(numbers.values())
        callers = {
            port: {component(other) for peer in peers for other in pods(documents) if _admits(peer, other)}
            for port, peers in rules.items()
            if peers is not None
        }
        smg = {50052: set()} if 50052 in rules else {}  # called by pods of another release
        expected = {"router": {}, "replica": {50051: {"router"}} | smg, "redis": {6379: {"router", "replica"}}}
        assert callers == expected[component(pod)]


def _guards(policy: Document, pod: Document) -> bool:
    return selects(policy["spec"]["podSelector"]["matchLabels"], pod)


def _admits(peer: Document, pod: Document) -> bool:
    return selects(peer["podSelector"]["matchLabels"], pod)


def test_network_policy_admits_clients_and_monitoring_of_the_values() -> None:
    given = values("no_redis")["networkPolicy"]
    policies = {
        each["metadata"]["name"]: each["spec"]["ingress"] for each in of_kind(rendered("no_redis"), "NetworkPolicy")
    }
    assert [rule["from"] for rule in policies["kvern-router"]] == [given["clients"], given["monitoring"]]
    assert policies["kvern-replica"][1]["from"] == given["monitoring"]


def test_claims_access_modes_are_a_value() -> None:
    """Field case G12."""
    [claim] = of_kind(rendered("two_models"), "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    used = [
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods(rendered("two_models"))
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "hub"
    ]
    assert used == [claim["metadata"]["name"]] * 2


def test_inference_pool_selects_one_pools_replicas() -> None:
    documents = rendered("everything")
    [pool] = of_kind(documents, "InferencePool")
    [chosen] = [pod for pod in pods(documents) if selects(pool["spec"]["selector"]["matchLabels"], pod)]
    assert component(chosen) == "replica"
    served = [container.settings().smg_listen for container in containers(chosen) if container.service == "detokenizer"]
    assert served == [f"0.0.0.0:{pool['spec']['targetPorts'][0]['number']}"]


def test_detokenizer_and_engine_are_told_alike_of_smg() -> None:
    [replica] = [pod for pod in pods(rendered("everything")) if component(pod) == "replica"]
    told = [container.settings() for container in containers(replica) if container.is_service]
    assert [(each.smg_salt, each.smg_kv_events) for each in told] == [("gateway", True)] * 2


def test_nobody_reaches_smg_ports_unless_the_values_name_them() -> None:
    documents = render({"replica": {"smg": {"enabled": True}}})
    [policy] = [each for each in of_kind(documents, "NetworkPolicy") if each["metadata"]["name"].endswith("-replica")]
    assert "smg" not in {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}


def test_notes_tell_the_first_call_and_what_one_replica_means() -> None:
    notes = _notes({})
    assert 'kvern generate --server 127.0.0.1:50051 --model smollm2 "' in notes
    assert "port-forward service/kvern 50051" in notes
    assert "stops before its successor loads" in notes


def test_notes_say_nothing_of_a_pause_where_there_is_none() -> None:
    pools = {
        "enough": {"model": {"name": "a"}, "replicas": 2},
        "spare": {"model": {"name": "b"}, "rollout": {"spareGpus": True}},
        "canary": {"model": {"name": "a"}},
    }
    assert "not served" not in _notes({"pools": pools})


@pytest.mark.parametrize(
    ("pool", "told"),
    [
        ({"autoscaling": {"kind": "keda"}}, "Pool default may have one replica"),
        ({"replicas": 3, "rollout": {"strategy": "Recreate"}}, "Pool default is replaced all at once"),
    ],
)
def test_notes_say_when_upgrades_are_noticed(pool: Document, told: str) -> None:
    assert told in _notes({"replica": pool})


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("minimal", set()),
        ("secure", {"--tls-ca", "--tls-server-name", "--tls-cert", "--tls-key"}),
        ("tenants", {"--api-key-file"}),
    ],
)
def test_command_in_notes_says_what_a_router_wants_to_see(name: str, flags: set[str]) -> None:
    notes = _notes(values(name))
    [command] = re.findall(r"^  kvern (generate .*(?:\n    .*)*)", notes, re.MULTILINE)
    named = set(re.findall(r"--[\w-]+", command))
    assert named == {"--server", "--model"} | flags
    assert named <= {flag for option in generate.params for flag in option.opts}
    assert ("Nobody is asked" in notes) == (name == "minimal")


def _notes(given: Document) -> str:
    [notes] = [text for name, text in render_files(given).items() if name.endswith("NOTES.txt")]
    return notes
