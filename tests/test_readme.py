"""The examples of README.md, run against a live set."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from google.protobuf import json_format

from kvern.client import Client
from kvern.v1 import inference_pb2
from tests.e2e.generation import collect
from tests.up_process import UpProcess

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
GRPC_ADDRESS, HTTP_ADDRESS = "127.0.0.1:50051", "127.0.0.1:8000"


def example(language: str, containing: str) -> str:
    """Return the one code block of a language that contains a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    [found] = [block for block in blocks if containing in block]
    return found


def argument_after(option: str, command: list[str]) -> str:
    return command[command.index(option) + 1]


@pytest.mark.parametrize("client", ["import Client", "import AsyncClient"])
def test_python_example_prints_answer(running_set: UpProcess, client: str) -> None:
    program = example("python", client)
    assert GRPC_ADDRESS in program
    command = [sys.executable, "-P", "-c", program.replace(GRPC_ADDRESS, running_set.listen)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Paris" in done.stdout, done.stderr


def test_grpcurl_example_names_a_method_and_a_request_that_exist(client: Client) -> None:
    command = shlex.split(example("sh", "grpcurl"))
    assert command[-2:] == [GRPC_ADDRESS, "kvern.v1.InferenceService/Generate"]
    request = json_format.Parse(argument_after("-d", command), inference_pb2.GenerateRequest())
    assert "Paris" in collect(client.stream(request)).text


def test_curl_example_answers(running_set: UpProcess) -> None:
    command = shlex.split(example("sh", "curl http"))
    url = command[1].replace(HTTP_ADDRESS, running_set.http)
    name, _, value = argument_after("-H", command).partition(": ")
    response = httpx.post(url, headers={name: value}, content=argument_after("-d", command), timeout=60)
    assert "Paris" in response.json()["choices"][0]["message"]["content"]


def test_openai_example_calls_the_tool(running_set: UpProcess) -> None:
    program = example("python", "import OpenAI").replace(HTTP_ADDRESS, running_set.http)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert "name='weather'" in done.stdout, done.stderr


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^\$ kvern (\w+)", README, re.MULTILINE))))
def test_command_of_readme_exists(command: str) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("kvern")), command, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
