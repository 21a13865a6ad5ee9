"""Pods: what their containers are told is what the services understand, and they start, stop and fit."""

from __future__ import annotations

from pathlib import PurePath

import pytest

from kvern.cli.download import download
from kvern.services.engine.stall_watch import INTERVAL_S
from kvern.services.runtime.stall import STALL_RULE
from tests.helm.chart import (
    NAMESPACE,
    VALUES,
    Container,
    Document,
    all_containers,
    component,
    containers,
    deployment,
    mebibytes,
    of_kind,
    pods,
    rendered,
    service,
    services,
)

WEDGED_AFTER_S = STALL_RULE.min_s + INTERVAL_S
"""From when an engine's loop stands until the service itself says so."""


@pytest.mark.parametrize("name", VALUES)
def test_service_understands_its_flags_and_variables(name: str) -> None:
    for container in services(rendered(name)):
        settings = container.settings()
        assert {each for each in container.environment if each.startswith("KVERN_")} <= {"KVERN_REDIS"}
        assert settings.drain_timeout_s > 0


@pytest.mark.parametrize("name", VALUES)
def test_probe_asks_the_status_port_that_its_container_serves(name: str) -> None:
    for container in services(rendered(name)):
        settings = container.settings()
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container.spec[probe]["httpGet"]
            assert container.ports[asked["port"]] == int(settings.status_listen.rpartition(":")[2])
            assert asked["scheme"] == ("HTTP" if settings.tls_cert is None else "HTTPS")
        assert container.spec["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert container.spec["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("name", VALUES)
def test_declared_ports_are_those_that_are_served(name: str) -> None:
    for container in services(rendered(name)):
        settings = container.settings()
        served = {
            address.rpartition(":")[2]
            for address in (*settings.listen, settings.status_listen, getattr(settings, "smg_listen", None))
            if address is not None and "unix" not in address
        }
        assert {str(port) for port in container.ports.values()} == served
    for pod in pods(rendered(name)):
        named = [port for container in containers(pod) for port in container.ports]
        assert len(named) == len(set(named))


@pytest.mark.parametrize("name", VALUES)
def test_socket_that_is_dialled_is_one_that_is_served_in_a_shared_folder(name: str) -> None:
    dials = {"tokenizer", "engine", "router"}
    for pod in pods(rendered(name)):
        inside = [container for container in containers(pod) if container.is_service]
        served = {address for each in inside for address in each.settings().listen if address.startswith("unix:")}
        dialled = {
            value
            for each in inside
            for key, value in each.settings().model_dump().items()
            if key in dials and str(value).startswith("unix:")
        }
        assert dialled == served
        for address in served:
            assert len(address) < 100
            assert all(_volume(each, address.removeprefix("unix:").rpartition("/")[0]) == "sockets" for each in inside)


def _volume(container: Container, path: str) -> str:
    [name] = [mount["name"] for mount in container.spec["volumeMounts"] if mount["mountPath"] == path]
    return name


@pytest.mark.parametrize("name", VALUES)
def test_tokenizer_serves_the_model_of_every_pool_under_its_engines_name(name: str) -> None:
    documents = rendered(name)
    tokenizer = service(documents, "tokenizer").settings()
    engines = {
        each.settings().served_model_name: each.settings() for each in services(documents) if each.service == "engine"
    }
    assert {tokenizer.served_model_name, *tokenizer.more_models} == engines.keys()
    for replica in (each for each in pods(documents) if component(each) == "replica"):
        models = [each.settings().model for each in containers(replica) if each.is_service]
        assert len(set(models)) == 1


@pytest.mark.parametrize("name", VALUES)
def test_local_model_lies_on_a_volume_that_the_container_mounts(name: str) -> None:
    """Field case G11."""
    for container in services(rendered(name)):
        settings = container.settings()
        models = [getattr(settings, "model", "-"), *getattr(settings, "more_models", {}).values()]
        mounted = [mount["mountPath"] for mount in container.spec["volumeMounts"]]
        for model in models:
            if model.startswith("/"):
                assert any(f"{model}/".startswith(f"{path}/") for path in mounted)
            elif "/" in model:
                assert container.environment["HF_HUB_OFFLINE"] == "1"
                assert container.environment["HF_HOME"] in mounted


@pytest.mark.parametrize("name", ["hub", "two_models"])
def test_token_is_in_the_download_only_whose_command_exists(name: str) -> None:
    holders = [each for each in all_containers(rendered(name)) if "HF_TOKEN" in each.environment]
    assert {each.name.partition("-")[0] for each in holders} == {"download"}
    for each in holders:
        [program, command, *arguments] = each.spec["command"]
        assert (program, command) == ("kvern", download.name)
        context = download.make_context(command, list(arguments))
        assert context.params["tokenizer_only"] == (component(each.pod) == "router")


@pytest.mark.parametrize("name", VALUES)
def test_main_containers_are_those_that_must_end_first(name: str) -> None:
    for pod in pods(rendered(name)):
        spec = pod["spec"]
        sidecars = [each["name"] for each in spec.get("initContainers", ()) if each.get("restartPolicy") == "Always"]
        mains = [each["name"] for each in spec["containers"]]
        native = name != "plain_containers"
        expected = {"router": "tokenizer", "replica": "engine", "redis": None}[component(pod)]
        assert sidecars == ([expected] if native and expected else [])
        assert native or expected is None or expected in mains
        assert mains[0] == {"router": "router", "replica": "detokenizer", "redis": "redis"}[component(pod)]


def _startup_s(container: Container) -> int:
    probe = container.spec["startupProbe"]
    return probe["failureThreshold"] * probe["periodSeconds"]


@pytest.mark.parametrize(("name", "seconds"), [("minimal", 1800), ("gpu", 1800), ("plain_containers", 3601)])
def test_engine_that_loads_for_ten_minutes_is_never_killed(name: str, seconds: int) -> None:
    """Field case G01: liveness waits for the startup probe, which waits for readiness."""
    engine = service(rendered(name), "engine")
    assert engine.spec["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert _startup_s(engine) >= seconds > 600


@pytest.mark.parametrize("name", VALUES)
def test_main_container_is_not_killed_for_what_it_waits_for(name: str) -> None:
    """Field case G06: a socket that comes late makes it unready, and nothing else."""
    for container in services(rendered(name)):
        if container.service in ("router", "detokenizer", "gateway"):
            assert container.spec["startupProbe"]["httpGet"]["path"] == "/healthz"


@pytest.mark.parametrize("name", VALUES)
def test_wedged_engine_is_unready_within_ten_seconds(name: str) -> None:
    """Field case G02, by the numbers."""
    for container in services(rendered(name)):
        probe = container.spec["readinessProbe"]
        assert WEDGED_AFTER_S + probe["periodSeconds"] * probe["failureThreshold"] < 10
        assert probe["timeoutSeconds"] < probe["periodSeconds"]


@pytest.mark.parametrize("name", VALUES)
def test_grace_is_longer_than_any_drain(name: str) -> None:
    """Field case G04. Main containers drain at once, native sidecars after them."""
    for pod in pods(rendered(name)):
        drains: dict[bool, list[float]] = {True: [], False: [0.0]}
        for container in (each for each in containers(pod) if each.is_service):
            settings = container.settings()
            is_sidecar = container.spec.get("restartPolicy") == "Always"
            drains[is_sidecar].append(settings.drain_delay_s + settings.drain_timeout_s)
        needed = max(drains[False]) + sum(drains[True])
        assert needed + 10 <= pod["spec"]["terminationGracePeriodSeconds"]
        assert component(pod) == "redis" or max(drains[False]) > 30


def test_plain_sidecar_outlives_what_needs_it() -> None:
    documents = rendered("plain_containers")
    engine, detokenizer = (service(documents, name).settings() for name in ("engine", "detokenizer"))
    assert engine.drain_delay_s >= detokenizer.drain_delay_s
    assert engine.drain_delay_s + engine.drain_timeout_s > detokenizer.drain_delay_s + detokenizer.drain_timeout_s
    tokenizer, router, gateway = (service(documents, name).settings() for name in ("tokenizer", "router", "gateway"))
    assert tokenizer.drain_delay_s > router.drain_delay_s > gateway.drain_delay_s


@pytest.mark.parametrize("name", VALUES)
def test_rollout_has_time_for_start_and_drain(name: str) -> None:
    for each in of_kind(rendered(name), "Deployment"):
        spec = each["spec"]
        inside = [container for container in containers(spec["template"]) if container.is_service]
        if inside:
            slowest = max(_startup_s(container) for container in inside)
            grace = spec["template"]["spec"]["terminationGracePeriodSeconds"]
            assert spec["progressDeadlineSeconds"] > slowest + grace


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("minimal", {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}),
        ("gpu", {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}),
        ("several_gpus", {"type": "Recreate"}),
    ],
)
def test_rollout_of_replicas_is_as_gpus_allow(name: str, strategy: Document) -> None:
    """Field case G13."""
    assert deployment(rendered(name), "replica")["spec"]["strategy"] == strategy
    routers = deployment(rendered(name), "router")["spec"]["strategy"]
    assert routers == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


@pytest.mark.parametrize("name", VALUES)
def test_pod_passes_restricted_security(name: str) -> None:
    """Field cases G08 and G09: any user, a shared group, a read-only root with what is written on volumes."""
    for pod in pods(rendered(name)):
        spec = pod["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security.get("fsGroup") == (None if name == "foreign_uid" else 10001)
        assert ("runAsUser" in security) == (name != "foreign_uid")
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert {kind for each in spec["volumes"] for kind in each if kind != "name"} <= _RESTRICTED_VOLUMES
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
        for container in containers(pod):
            assert container.spec["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any("hostPort" in port for port in container.spec.get("ports", ()))
            writable = {mount["mountPath"] for mount in container.spec["volumeMounts"] if not mount.get("readOnly")}
            assert "/tmp" in writable
            assert component(pod) == "redis" or "/var/cache/kvern" in writable


_RESTRICTED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "image"}
"""Those of Kubernetes' restricted level that the chart has a use for; `image` came to it with 1.33."""


@pytest.mark.parametrize("name", VALUES)
def test_container_has_requests_and_limits(name: str) -> None:
    """Field case G14."""
    for container in all_containers(rendered(name)):
        resources = container.spec["resources"]
        for amounts in (resources["requests"], resources["limits"]):
            assert {"cpu", "memory"} <= amounts.keys()
        assert mebibytes(resources["requests"]["memory"]) <= mebibytes(resources["limits"]["memory"])


@pytest.mark.parametrize(("name", "shm", "limit"), [("minimal", 256, 4 * 1024), ("several_gpus", 8 * 1024, 512 * 1024)])
def test_shared_memory_is_sized_and_counted(name: str, shm: int, limit: int) -> None:
    """Field case G05."""
    documents = rendered(name)
    engine = service(documents, "engine")
    [volume] = [
        each["emptyDir"] for each in engine.pod["spec"]["volumes"] if each["name"] == _volume(engine, "/dev/shm")
    ]
    assert (volume["medium"], mebibytes(volume["sizeLimit"])) == ("Memory", shm)
    assert mebibytes(engine.spec["resources"]["limits"]["memory"]) == limit + shm


@pytest.mark.parametrize(
    ("name", "resource", "count", "image", "device"),
    [
        ("minimal", None, None, "engine-cpu", "cpu"),
        ("gpu", "nvidia.com/gpu", "1", "engine-gpu", "cuda"),
        ("several_gpus", "amd.com/gpu", "8", "engine-gpu", "cuda"),
    ],
)
def test_gpus_are_asked_for_by_the_engine_alone(name: str, resource: str, count: str, image: str, device: str) -> None:
    documents = rendered(name)
    for container in all_containers(documents):
        for amounts in (container.spec["resources"]["requests"], container.spec["resources"]["limits"]):
            gpus = {key: value for key, value in amounts.items() if "/" in key}
            assert gpus == ({resource: count} if resource and container.name == "engine" else {})
    engine = service(documents, "engine")
    assert f"/{image}:" in engine.spec["image"]
    assert engine.settings().device == device
    assert engine.settings().tensor_parallel_size == int(count or 1)


def test_runtime_class_and_scheduling_are_values() -> None:
    spec = deployment(rendered("gpu"), "replica")["spec"]["template"]["spec"]
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["nodeSelector"] == {"accelerator": "h200"}
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    spread = [each["whenUnsatisfiable"] for each in spec["topologySpreadConstraints"]]
    assert spread == ["ScheduleAnyway"] * 2


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("minimal", "redis://kvern-redis:6379"),
        ("external_redis", "rediss://redis.example:6380/1?ssl_ca_certs=/etc/kvern/redis/ca.crt"),
        ("secret_redis", "rediss://:secret@redis.example:6380/0"),
        ("no_redis", None),
        ("secure", "redis://kvern-{role}@kvern-redis:6379"),
    ],
)
def test_router_and_engine_are_told_of_the_same_redis(name: str, url: str | None) -> None:
    documents = rendered(name)
    for container in (service(documents, "router"), service(documents, "engine")):
        assert container.settings().redis == (url and url.format(role=container.name))
        assert "redis" not in container.flags
        if name in ("external_redis", "secret_redis"):
            assert _volume(container, "/etc/kvern/redis") == "redis-ca"
    assert any(component(pod) == "redis" for pod in pods(documents)) == (name in ("minimal", "secure"))


def test_own_redis_keeps_nothing_on_disk_and_refuses_rather_than_forgets() -> None:
    [redis] = [each for each in all_containers(rendered("minimal")) if each.name == "redis"]
    arguments = redis.spec["args"]
    told = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert (told["--save"], told["--appendonly"], told["--maxmemory-policy"]) == ("", "no", "noeviction")
    limit = mebibytes(redis.spec["resources"]["limits"]["memory"])
    assert int(told["--maxmemory"].removesuffix("mb")) * 1.2 < limit


def test_secure_pod_finds_its_certificates_keys_and_passwords_on_mounted_secrets() -> None:
    for container in services(rendered("secure")):
        settings = container.settings().model_dump()
        files = {name: str(value) for name, value in settings.items() if isinstance(value, PurePath)}
        volumes = {volume["name"]: volume for volume in container.pod["spec"]["volumes"]}
        for name, file in files.items():
            folder, _, key = file.rpartition("/")
            secret = volumes[_volume(container, folder)]["secret"]
            assert key in [item["path"] for item in secret.get("items", [])] or key in ("tls.crt", "tls.key", "ca.crt")
            expected = {"ticket_key_file": "tickets", "redis_password_file": "redis-passwords"}
            own = "router-tls" if component(container.pod) == "router" else "replica-tls"
            by_clients = name == "tls_client_ca" and own == "router-tls"
            assert secret["secretName"] == ("clients" if by_clients else expected.get(name, own))
        assert {"tls_cert", "tls_key"} <= files.keys()


def test_replicas_of_a_secure_release_let_in_its_routers_alone() -> None:
    documents = rendered("secure")
    router, replica = (service(documents, name).settings() for name in ("router", "detokenizer"))
    assert replica.router_identities == (f"kvern-router.{NAMESPACE}.svc",)
    assert replica.tls_client_ca is not None
    assert router.tls_ca is not None
    assert router.ticket_key_file == replica.ticket_key_file


def test_monitors_and_services_of_a_secure_release_know_of_tls() -> None:
    documents = rendered("secure")
    [monitor] = of_kind(documents, "PodMonitor")
    assert {each["scheme"] for each in monitor["spec"]["podMetricsEndpoints"]} == {"https"}
    ports = [
        port for each in of_kind(documents, "Service") for port in each["spec"]["ports"] if port["name"] != "redis"
    ]
    assert {port["appProtocol"] for port in ports} == {"https"}


def test_replica_registers_under_its_pods_address_and_name() -> None:
    assert service(rendered("minimal"), "engine").settings().advertise == "10.1.2.3:50051"
    assert service(rendered("foreign_uid"), "engine").settings().advertise == "[10.1.2.3]:50051"
    assert service(rendered("minimal"), "engine").settings().replica_id == "kvern-replica-default-abc"


def test_what_a_pool_says_of_its_pods_is_there() -> None:
    documents = rendered("everything")
    pod = deployment(documents, "replica")["spec"]["template"]
    assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    assert pod["metadata"]["labels"]["cost-center"] == "42"
    assert pod["metadata"]["annotations"] == {"example.com/owner": "serving"}
    assert pod["spec"]["priorityClassName"] == "high"
    assert "nodeAffinity" in pod["spec"]["affinity"]
    engine, detokenizer = service(documents, "engine"), service(documents, "detokenizer")
    assert engine.environment["OMP_NUM_THREADS"] == "4"
    assert detokenizer.environment == {"MALLOC_ARENA_MAX": "2"}
    assert engine.settings().enable_prefix_caching is False
    assert detokenizer.settings().max_streams == 512


def test_large_number_in_settings_stays_one() -> None:
    assert service(rendered("gpu"), "engine").settings().max_num_batched_tokens == 1000000


def test_traces_go_where_the_values_say() -> None:
    for container in services(rendered("everything")):
        settings = container.settings()
        assert (settings.otlp_endpoint, settings.trace_sample_ratio) == ("http://collector:4317", 0.05)
