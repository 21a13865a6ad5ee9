"""Which processes make a set, and what each is told."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.engine.settings import EngineSettings
from kvern.services.gateway.settings import GatewaySettings
from kvern.services.router.settings import RouterSettings
from kvern.services.runtime.model_source import ModelSource, find_model
from kvern.services.runtime.settings import ENV_PREFIX, ServiceSettings, SettingsError
from kvern.services.tokenizer.settings import TokenizerSettings
from kvern.supervisor.addresses import Address, parse_address
from kvern.supervisor.process import ProcessSpec
from kvern.supervisor.readiness import HealthProbe, PortProbe, Probe, RedisProbe, RouterProbe

Value = str | bool

SERVICES: dict[str, type[ServiceSettings]] = {
    "tokenizer": TokenizerSettings,
    "engine": EngineSettings,
    "detokenizer": DetokenizerSettings,
    "router": RouterSettings,
    "gateway": GatewaySettings,
}

_OWN_FIELDS = frozenset(
    {"config", "listen", "tokenizer", "replicas", "engine", "router", "supervisor_pid", "drain_delay_s", "more_models"}
    | {"redis", "redis_password_file", "advertise", "replica_id", "replica_authority", "router_identities"}
)
"""Settings that the set gives its services itself: how they are connected, no wait for a load balancer, one model."""

_CLIENT_VARIABLES = frozenset({"KVERN_SERVER", "KVERN_TLS_SERVER_NAME", "KVERN_API_KEY", "KVERN_API_KEY_FILE"})


@dataclass(frozen=True, slots=True)
class SetOptions:
    """What a person asks for."""

    listen: Address
    """Where clients connect, in gRPC."""

    http: Address
    replicas: int
    settings: Mapping[str, Value]
    """Settings of services by field name. Each goes to every service that has the field."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A set that has been checked and can be started."""

    model: ModelSource
    specs: list[ProcessSpec]
    status: Mapping[str, str]
    """Where each service tells of its health and metrics, by process name. Empty unless it was asked for."""
    has_tls: bool
    """Whether its TCP ports speak TLS."""
    asks_callers: bool
    """Whether callers must show who they are."""
    drain_timeout_s: float


def setting_fields() -> dict[str, tuple[bool, str]]:
    """Return the settings a person can give to a set: name to whether it is yes-or-no, and what it means."""
    return {
        name: (field.annotation is bool, field.description or "")
        for settings in SERVICES.values()
        for name, field in settings.model_fields.items()
        if name not in _OWN_FIELDS
    }


def prepare(options: SetOptions, folder: Path, environ: Mapping[str, str] = os.environ) -> Launch:
    """Check everything that can be known before a process starts. Raises SettingsError and ModelNotFound."""
    _refuse_unknown_variables(environ)
    wiring = _Wiring(options, folder, environ)
    asked = wiring.engine()
    engine = EngineSettings.load(asked.flags, prog="kvern up", environ=asked.environ)
    model = find_model(engine.model)
    specs, status, asks_callers = wiring.specs(engine), {}, False
    for spec in specs:
        if (settings_class := SERVICES.get(_service(spec.name))) is not None:
            settings = settings_class.load(spec.flags, prog="kvern up", environ=spec.environ)
            if settings.status_listen is not None:
                status[spec.name] = settings.status_listen
            if isinstance(settings, RouterSettings):
                asks_callers = settings.asks_callers
                _check_digest_key(settings, engine)
    return Launch(model, specs, status, engine.tls_cert is not None, asks_callers, engine.drain_timeout_s)


def _check_digest_key(router: RouterSettings, engine: EngineSettings) -> None:
    if router.tenants is not None and engine.digest_key_file is None:
        raise SettingsError("digest_key_file: needed with tenants, as salt_secret_file is")


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = setting_fields()
    for name in sorted(environ):
        field = name.removeprefix(ENV_PREFIX).lower()
        if not name.startswith(ENV_PREFIX) or name in _CLIENT_VARIABLES or field in known:
            continue
        why = "kvern up connects its services itself" if field in _OWN_FIELDS else "no service has such a setting"
        raise SettingsError(f"{name}: {why}; unset it")


class _Wiring:
    """Who listens where and calls whom."""

    def __init__(self, options: SetOptions, folder: Path, environ: Mapping[str, str]) -> None:
        self._options = options
        self._folder = folder
        self._environ = environ

    def specs(self, engine: EngineSettings) -> list[ProcessSpec]:
        indices = range(self._options.replicas)
        threads = self._threads(engine)
        specs = [
            *self._private_redis(),
            self._spec("tokenizer", {"model": engine.model}),
            *(self._spec(f"engine-{index}", threads | self._announcing(index)) for index in indices),
            *self._detokenizers(engine.model),
            self._router(),
            self._gateway(),
        ]
        return specs if engine.status_listen is None else _numbered(specs, "status-listen", engine.status_listen)

    def engine(self) -> ProcessSpec:
        """Return an engine as the person asked for it: the rest depends on what its settings say."""
        return self._spec("engine-0", {})

    def _inherited(self, service: str) -> dict[str, str]:
        """Return what a service inherits: of our variables only those that it knows, for it refuses others."""
        own = {f"{ENV_PREFIX}{field.upper()}" for field in SERVICES[service].model_fields if field not in _OWN_FIELDS}
        return {name: value for name, value in self._environ.items() if not name.startswith(ENV_PREFIX) or name in own}

    def _threads(self, engine: EngineSettings) -> dict[str, Value]:
        """Return the engines' shares of the cores: each would take them all."""
        if self._options.replicas == 1 or engine.num_threads is not None:
            return {}
        return {"num_threads": str(max(1, len(os.sched_getaffinity(0)) // self._options.replicas))}

    @property
    def _has_index(self) -> bool:
        """Whether there is anything to choose: one replica needs no index."""
        return self._options.replicas > 1

    @property
    def _redis_path(self) -> Path:
        return self._folder / "redis.sock"

    def _private_redis(self) -> list[ProcessSpec]:
        if not self._has_index:
            return []
        flags = [f"--socket={self._redis_path}"]
        module, environ = "kvern.supervisor.private_redis", dict(self._environ)
        return [ProcessSpec("redis", module, flags, environ, RedisProbe(self._redis_path))]

    def _redis(self) -> dict[str, Value]:
        return {"redis": f"unix://{self._redis_path}"} if self._has_index else {}

    def _announcing(self, index: int) -> dict[str, Value]:
        if not self._has_index:
            return {}
        return self._redis() | {"advertise": self._socket(f"detokenizer-{index}")}

    def _detokenizers(self, model: str) -> list[ProcessSpec]:
        specs = [
            self._spec(f"detokenizer-{index}", {"model": model, "engine": self._socket(f"engine-{index}")})
            for index in range(self._options.replicas)
        ]
        first = DetokenizerSettings.load(specs[0].flags, prog="kvern up", environ=specs[0].environ).smg_listen
        return specs if first is None else _numbered(specs, "smg-listen", first)

    def _router(self) -> ProcessSpec:
        detokenizers = [self._socket(f"detokenizer-{index}") for index in range(self._options.replicas)]
        return self._spec(
            "router",
            {
                "listen": f"{self._socket('router')},{self._options.listen}",
                "tokenizer": self._socket("tokenizer"),
                "replicas": ",".join(detokenizers),
                **self._redis(),
            },
            RouterProbe(self._socket("router")),
        )

    def _gateway(self) -> ProcessSpec:
        probe = PortProbe(self._options.http.reachable)
        return self._spec("gateway", {"listen": str(self._options.http), "router": self._socket("router")}, probe)

    def _spec(self, name: str, values: Mapping[str, Value], probe: Probe | None = None) -> ProcessSpec:
        service = _service(name)
        given = {
            field: value for field, value in self._options.settings.items() if field in SERVICES[service].model_fields
        }
        own: dict[str, Value] = {"listen": self._socket(name), "drain_delay_s": "0"}
        flags = [_flag(field, value) for field, value in {**given, **own, **values}.items()]
        module, probe = f"kvern.services.{service}", probe or HealthProbe(self._socket(name))
        return ProcessSpec(name, module, flags, self._inherited(service), probe)

    def _socket(self, name: str) -> str:
        return f"unix:{self._folder / name}.sock"


def _numbered(specs: Sequence[ProcessSpec], flag: str, first: str) -> list[ProcessSpec]:
    """Give each service a port of its own to listen on, from the first one upwards."""
    host, ports = parse_address(first).host, itertools.count(parse_address(first).port)
    return [
        replace(spec, flags=[*_without(flag, spec.flags), f"--{flag}={Address(host, next(ports))}"])
        if _service(spec.name) in SERVICES
        else spec
        for spec in specs
    ]


def _without(flag: str, flags: Sequence[str]) -> Iterator[str]:
    return (each for each in flags if not each.startswith(f"--{flag}="))


def _service(name: str) -> str:
    """Return what a process of this name runs."""
    return name.partition("-")[0]


def _flag(field: str, value: Value) -> str:
    name = field.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"
