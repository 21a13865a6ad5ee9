from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from kvern.services.runtime.settings import Addresses, RedisUrl, ServiceSettings, SettingsError


class Settings(ServiceSettings):
    """A service's settings."""

    model: str = "smollm2"
    """A model."""

    max_streams: int = Field(8, ge=1)
    """A bound."""

    replicas: Addresses = ()
    """Peers."""

    prefix_caching: bool = True
    """A switch."""

    served_model_name: str | None = None
    """A name."""


LISTEN = ["--listen", "unix:/x.sock"]


def load(*flags: str, **environ: str) -> Settings:
    return Settings.load([*LISTEN, *flags], prog="test", environ=environ)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def test_defaults_apply_where_nothing_is_said() -> None:
    settings = load()
    assert (settings.model, settings.max_streams, settings.drain_delay_s) == ("smollm2", 8, 5.0)
    assert settings.listen == ("unix:/x.sock",)


def test_flag_ranks_above_variable_above_file_above_default(file: Path) -> None:
    file.write_text("model: from-file\nmax-streams: 1\nserved_model_name: from-file\n")
    variables = {"KVERN_MODEL": "from-variable", "KVERN_MAX_STREAMS": "2"}
    settings = load("--config", str(file), "--max-streams", "3", **variables)
    assert (settings.served_model_name, settings.model, settings.max_streams) == ("from-file", "from-variable", 3)
    assert settings.log_level == "info"


def test_file_can_be_named_by_a_variable(file: Path) -> None:
    file.write_text("model: from-file\n")
    assert load(KVERN_CONFIG=str(file)).model == "from-file"


@pytest.mark.parametrize("flags", [["--replicas", "a:1,unix:/b", "--replicas", "c:2"], ["--replicas=a:1,unix:/b,c:2"]])
def test_addresses_come_repeated_or_joined(flags: list[str]) -> None:
    assert load(*flags).replicas == ("a:1", "unix:/b", "c:2")


def test_addresses_come_joined_in_a_variable_and_as_a_list_in_a_file(file: Path) -> None:
    assert load(KVERN_REPLICAS="a:1, unix:/b").replicas == ("a:1", "unix:/b")
    file.write_text("replicas: [a:1, unix:/b]\n")
    assert load("--config", str(file)).replicas == ("a:1", "unix:/b")


def test_switch_can_be_turned_off() -> None:
    assert load("--prefix-caching").prefix_caching is True
    assert load("--no-prefix-caching").prefix_caching is False
    assert load(KVERN_PREFIX_CACHING="false").prefix_caching is False


def test_variables_of_the_process_itself_do_not_count_where_others_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVERN_MODEL", "of-the-process")
    assert load().model == "smollm2"
    assert Settings.load(LISTEN, prog="test").model == "of-the-process"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load().model = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (["--max-streams", "0"], {}, "max_streams: .*greater than or equal to 1.*'0'"),
        (["--max-streams", "many"], {}, "max_streams: .*'many'"),
        (["--log-level", "loud"], {}, "log_level: .*'loud'"),
        (["--drain-delay-s", "-1"], {}, "drain_delay_s: "),
        ([], {"KVERN_MAX_STREAMS": "many"}, "max_streams: .*'many'"),
        ([], {"KVERN_MAX_STREAM": "2"}, "KVERN_MAX_STREAM: no such setting; did you mean KVERN_MAX_STREAMS?"),
        ([], {"KVERN_FOO": "2"}, "KVERN_FOO: no such setting"),
        (["--config", "/nowhere.yaml"], {}, "config: cannot read /nowhere.yaml"),
    ],
)
def test_bad_value_or_unknown_variable_is_refused_naming_it(
    flags: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load(*flags, **environ)


def test_unknown_flag_is_refused_naming_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--max-steams", "3")
    assert ended.value.code == 2
    assert "--max-steams" in capsys.readouterr().err


def test_flag_cut_short_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--max-str", "3")
    assert "--max-str" in capsys.readouterr().err


def test_required_setting_missing_is_refused_with_the_ways_to_give_it() -> None:
    with pytest.raises(SettingsError, match=r"listen: required \(--listen, KVERN_LISTEN\)"):
        Settings.load([], prog="test", environ={})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x\n", r"modle \(in .*\): no such setting; did you mean model\?"),
        ("- a\n- b\n", "holds no mapping"),
        ("a: [\n", "config: cannot read"),
        ("max_streams: many\n", "max_streams: .*'many'"),
    ],
)
def test_bad_file_is_refused_naming_the_key(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load("--config", str(file))


def test_help_tells_what_each_flag_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "--max-streams" in out
    assert "A bound." in out


class RedisSettings(ServiceSettings):
    """A test service."""

    redis: RedisUrl = "redis://127.0.0.1"


def test_load_wrong_address_is_refused_without_its_password() -> None:
    with pytest.raises(SettingsError, match=r"redis: .* must begin with one of redis://") as refused:
        RedisSettings.load(["--listen=a:1", "--redis=http://user:secret@host:6379"], prog="x", environ={})
    assert "secret" not in str(refused.value)
    assert "http://***@host:6379" in str(refused.value)
