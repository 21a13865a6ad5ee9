"""The chart as Helm renders it, and its documents' parts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.engine.settings import EngineSettings
from kvern.services.gateway.settings import GatewaySettings
from kvern.services.router.settings import RouterSettings
from kvern.services.runtime.settings import ServiceSettings
from kvern.services.tokenizer.settings import TokenizerSettings

Document = dict[str, Any]

HERE = Path(__file__).parent
CHART = HERE.parent.parent / "helm" / "kvern"
VALUES = sorted(path.stem for path in (HERE / "values").glob("*.yaml"))
NAMESPACE = "serving"

SETTINGS: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "tokenizer": TokenizerSettings,
    "gateway": GatewaySettings,
    "detokenizer": DetokenizerSettings,
    "engine": EngineSettings,
}

_MODULE = "kvern.services."
_SECRET = {"KVERN_REDIS": "rediss://:secret@redis.example:6380/0"}
_FIELDS = {"status.podIP": "10.1.2.3", "metadata.name": "kvern-replica-default-abc"}


@functools.cache
def load() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def values(name: str) -> dict[str, Any]:
    return yaml.safe_load((HERE / "values" / f"{name}.yaml").read_text())


def render_files(given: Mapping[str, Any], *, release: str = "kvern") -> dict[str, str]:
    """Return rendered text by template. Raises HelmError where values or templates are wrong."""
    return load().render(dict(given), name=release, namespace=NAMESPACE)


def render(given: Mapping[str, Any], *, release: str = "kvern") -> list[Document]:
    """Return the documents that an install would send."""
    files = render_files(given, release=release)
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.load_all(text, yaml.CSafeLoader) if document is not None]


@functools.cache
def rendered(name: str, release: str = "kvern") -> list[Document]:
    """Return the documents of a values file."""
    return render(values(name), release=release)


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def deployment(documents: list[Document], component: str) -> Document:
    [found] = [each for each in of_kind(documents, "Deployment") if labels_of(each)[_COMPONENT] == component]
    return found


def pods(documents: list[Document]) -> list[Document]:
    """Return pod templates: labels and spec."""
    return [each["spec"]["template"] for each in of_kind(documents, "Deployment")]


def labels_of(document: Document) -> dict[str, str]:
    return document["metadata"]["labels"]


def selects(selector: Mapping[str, str], pod: Document) -> bool:
    return selector.items() <= labels_of(pod).items()


def component(pod: Document) -> str:
    return labels_of(pod)[_COMPONENT]


_COMPONENT = "app.kubernetes.io/component"


@dataclass(frozen=True)
class Container:
    """A container of a pod."""

    pod: Document
    spec: Document

    @property
    def name(self) -> str:
        return self.spec["name"]

    @property
    def is_service(self) -> bool:
        return self.spec["command"][-1].startswith(_MODULE)

    @property
    def service(self) -> str:
        return self.spec["command"][-1].removeprefix(_MODULE)

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.spec.get("ports", ())}

    @property
    def environment(self) -> dict[str, str]:
        """Variables as the container would see them; of a Secret, what such a Secret might hold."""
        return {variable["name"]: _value(variable) for variable in self.spec.get("env", ())}

    @property
    def arguments(self) -> list[str]:
        return [_expand(argument, self.environment) for argument in self.spec.get("args", ())]

    @property
    def flags(self) -> set[str]:
        return {argument.removeprefix("--").partition("=")[0] for argument in self.spec["args"]}

    def settings(self) -> Any:
        """Parse flags and variables as the service does. Raises what it raises."""
        return _settings(self.service, tuple(self.arguments), frozenset(self.environment.items()))


@functools.cache
def _settings(service: str, arguments: tuple[str, ...], environment: frozenset[tuple[str, str]]) -> ServiceSettings:
    return SETTINGS[service].load(arguments, prog=service, environ=dict(environment))


def containers(pod: Document) -> Iterator[Container]:
    spec = pod["spec"]
    yield from (Container(pod, each) for each in [*spec.get("initContainers", ()), *spec["containers"]])


def all_containers(documents: list[Document]) -> list[Container]:
    return [container for pod in pods(documents) for container in containers(pod)]


def services(documents: list[Document]) -> list[Container]:
    return [container for container in all_containers(documents) if container.is_service]


def service(documents: list[Document], name: str) -> Container:
    [found] = [container for container in services(documents) if container.service == name]
    return found


def mebibytes(quantity: str) -> int:
    units = {"Mi": 1, "Gi": 1024}
    return int(quantity[:-2]) * units[quantity[-2:]]


def _value(variable: Document) -> str:
    source = variable.get("valueFrom")
    if source is None:
        return variable["value"]
    if "fieldRef" in source:
        return _FIELDS[source["fieldRef"]["fieldPath"]]
    return _SECRET.get(variable["name"], "secret")


def _expand(text: str, environment: Mapping[str, str]) -> str:
    for name, value in environment.items():
        text = text.replace(f"$({name})", value)
    return text
