"""Commands that call a server in TLS, which asks for their certificate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.client.scripted_server import ScriptedServer, delta, finished, responds, started
from tests.services.certificates import Authority, Pair
from tests.up_process import run_kvern


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server(authority: Authority) -> Iterator[str]:
    pair = authority.sign("server")
    credentials = grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.certificate.read_bytes())], authority.file.read_bytes(), True
    )
    running = ScriptedServer(
        responds(started(), delta("Hi", 1), finished()), address="localhost:0", credentials=credentials
    )
    running.start()
    yield running.address
    running.stop()


def flags(authority: Authority, pair: Pair) -> list[str]:
    return [f"--tls-ca={authority.file}", *pair.flags]


def test_command_with_a_certificate_that_is_asked_for_is_answered(server: str, authority: Authority) -> None:
    done = run_kvern("generate", "--server", server, *flags(authority, authority.sign("client")), "Hi")
    assert (done.returncode, done.stdout) == (0, "Hi\n"), done.stderr


def test_command_takes_its_certificate_from_variables(server: str, authority: Authority) -> None:
    pair = authority.sign("client")
    files = {"CA": authority.file, "CERT": pair.certificate, "KEY": pair.key}
    environ = {f"KVERN_TLS_{name}": str(file) for name, file in files.items()}
    done = run_kvern("chat", "--server", server, "Hi", environ=environ)
    assert (done.returncode, done.stdout) == (0, "Hi\n"), done.stderr


def test_command_finds_a_server_by_the_name_in_its_certificate_that_no_address_says(authority: Authority) -> None:
    """As through a port that kubectl forwards."""
    pair = authority.sign("server", "kvern.serving.svc")
    credentials = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.certificate.read_bytes())])
    # An address of this machine that is in no certificate.
    running = ScriptedServer(
        responds(started(), delta("Hi", 1), finished()), address="127.0.0.2:0", credentials=credentials
    )
    running.start()
    named = [f"--tls-ca={authority.file}", "--tls-server-name=kvern.serving.svc"]
    done = run_kvern("generate", "--server", running.address, *named, "Hi")
    running.stop()
    assert (done.returncode, done.stdout) == (0, "Hi\n"), done.stderr


@pytest.mark.parametrize("given", [["--tls-cert"], ["--tls-cert", "--tls-key"], ["--tls-server-name"]])
def test_tls_flags_that_make_no_sense_alone_are_refused_by_name(given: list[str], authority: Authority) -> None:
    done = run_kvern("models", *(f"{flag}={authority.file}" for flag in given))
    assert done.returncode == 2
    assert given[0] in done.stderr
