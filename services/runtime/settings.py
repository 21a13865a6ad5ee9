"""Settings of a service: from flags, then KVERN_* variables, then a file, then defaults. Parsed once, then frozen."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

import pydantic_settings
import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from kvern.services.runtime.logs import LogFormat, LogLevel

ENV_PREFIX = "KVERN_"


class SettingsError(Exception):
    """A setting is unknown or wrong. The message names it and where it came from."""


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _split_each(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_split_each)]
"""`host:port` or `unix:/path`, several by repeating the flag or with commas."""


def check_tcp_address(address: str) -> str:
    """Return `host:port` or `[v6]:port` as it is. Raises ValueError where it is something else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address} is not host:port")
    return address


def _known_scheme(url: str) -> str:
    if urlsplit(url).scheme not in _REDIS_SCHEMES:
        raise ValueError(f"must begin with one of {', '.join(f'{scheme}://' for scheme in _REDIS_SCHEMES)}")
    return url


_REDIS_SCHEMES = (
    "redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"
)  # fmt: skip

RedisUrl = Annotated[str, AfterValidator(_known_scheme)]
"""`redis://host:port`, `unix:///path` and so on. A password in it belongs into a variable, not into a flag."""


def check_redis_password(file: Path | None, info: ValidationInfo) -> Path | None:
    """Return the setting redis_password_file as it is. Raises ValueError where `redis` leaves no place for it."""
    url = info.data.get("redis")
    if file is not None and (url is None or urlsplit(url).password):
        raise ValueError("goes with redis, whose URL then holds no password")
    return file


RedisPasswordFile = Annotated[Path | None, AfterValidator(check_redis_password)]
"""Of the setting redis_password_file, which stands below `redis`."""


def _otlp(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://host:port or https://host:port")
    return url


class ServiceSettings(BaseSettings):
    """What every service can be told. Each field is a flag, a KVERN_ variable and a key of the settings file."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    config: Path | None = None
    """YAML file of settings, named as the flags."""

    listen: Addresses
    """Addresses to serve gRPC on: host:port or unix:/path; repeat, or join with commas."""

    status_listen: Annotated[str, AfterValidator(check_tcp_address)] | None = None
    """host:port to serve /metrics, /healthz and /readyz on, over HTTP. Default: nowhere."""

    tls_cert: Path | None = None
    """PEM file of this process's certificate, followed by those that lead to its authority. With it all TCP listeners
    speak TLS; calls to others show it. It and the next three are read again when they change."""

    tls_key: Path | None = Field(default=None, validate_default=True)
    """PEM file of the key of tls-cert, without a password."""

    tls_client_ca: Path | None = None
    """PEM file of the authorities of callers: on TCP only who shows a certificate of theirs is served. The status port
    asks nobody. Default: callers need no certificate."""

    tls_ca: Path | None = None
    """PEM file of the authorities of those that this process calls over TCP: other services, then never without TLS,
    and the collector at an https:// address. Default: no TLS to other services."""

    otlp_endpoint: Annotated[str, AfterValidator(_otlp)] | None = None
    """http://host:port or https://host:port of a collector that takes traces by OTLP over gRPC. Default: no traces."""

    trace_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of requests to trace, of those that do not come with a trace of their own, whose word counts."""

    log_level: LogLevel = "info"
    """Least severe event to log."""

    log_format: LogFormat = "auto"
    """auto is console on a terminal, else json."""

    drain_delay_s: float = Field(5.0, ge=0)
    """Seconds in which new calls are still taken after SIGTERM, until load balancers have noticed."""

    drain_timeout_s: float = Field(30.0, ge=0)
    """Seconds that calls in flight have to end after that."""

    supervisor_pid: int | None = None
    """Process whose end ends this one at once. Set by `kvern up`."""

    @field_validator("tls_key")
    @classmethod
    def _key_and_certificate_together(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        if (key is None) != (info.data.get("tls_cert") is None):
            raise ValueError("tls_cert and tls_key must be given together")
        return key

    @field_validator("tls_client_ca")
    @classmethod
    def _callers_are_asked_in_tls(cls, client_ca: Path | None, info: ValidationInfo) -> Path | None:
        if client_ca is not None and info.data.get("tls_cert") is None:
            raise ValueError("needs tls_cert and tls_key: callers show certificates in TLS only")
        return client_ca

    @property
    def certificate_files(self) -> list[str]:
        """Files with certificates that the process uses."""
        return [str(file) for file in (self.tls_cert, self.tls_client_ca, self.tls_ca) if file is not None]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load` passes what variables and the file say as init arguments; flags come on top of them.
        return (init_settings,)

    @classmethod
    def load(cls, argv: Sequence[str], *, prog: str, environ: Mapping[str, str] = os.environ) -> Self:
        """Read all sources. Raises SettingsError; exits on --help and on flags that do not exist, as argparse does."""
        try:
            values = cls._file_values(argv, environ) | cls._variables(environ)
            return cls(_cli_parse_args=list(argv), _cli_prog_name=prog, **values)  # type: ignore[call-arg]
        except ValidationError as error:
            raise SettingsError("; ".join(_describe(item) for item in error.errors())) from error
        except pydantic_settings.SettingsError as error:
            raise SettingsError(str(error)) from error

    @classmethod
    def _variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        fields = {f"{ENV_PREFIX}{field.upper()}": field for field in cls.model_fields}
        given = sorted(name for name in environ if name.startswith(ENV_PREFIX))
        for name in given:
            if name not in fields:
                raise SettingsError(f"{name}: no such setting{_suggestion(name, set(fields))}")
        return {fields[name]: environ[name] for name in given}

    @classmethod
    def _file_values(cls, argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config", default=environ.get(f"{ENV_PREFIX}CONFIG"))
        path = parser.parse_known_args(list(argv))[0].config
        return {} if path is None else _read_file(Path(path), set(cls.model_fields))


def _read_file(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"config: cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"config: {path} holds no mapping of settings")
    settings = {str(key).replace("-", "_"): value for key, value in values.items()}
    for name in settings:
        if name not in known:
            raise SettingsError(f"{name} (in {path}): no such setting{_suggestion(name, known)}")
    return settings


def _suggestion(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _describe(item: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in item["loc"]) or "settings"
    if item["type"] == "missing":
        return f"{name}: required (--{name.replace('_', '-')}, {ENV_PREFIX}{name.upper()})"
    return f"{name}: {item['msg']} (got {_CREDENTIALS.sub('://***@', repr(item['input']))})"


_CREDENTIALS = re.compile("://.*@")
"""In an address. They are not for logs, not even where the address is wrong."""
