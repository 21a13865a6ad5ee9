"""Every method of every gRPC service, called with messages that are wrong, odd or no messages.

make fuzz INPUTS=100000
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvern.client import Client
from kvern.services.runtime.channel import CHANNEL_OPTIONS
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2, router_pb2, tokenizer_pb2
from tests.up_process import UpProcess

from .messages import Request, bad_messages

NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS", "0"))
"""In all, of the long run; by default each method gets FEW, the same ones every time."""

FEW = 40

TIMEOUT_S = 60.0
"""What takes this long hangs."""

MAX_RESPONSES = 8
"""After which the caller of a stream goes away."""

OUR_FAULT = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAVAILABLE,
             grpc.StatusCode.DEADLINE_EXCEEDED}  # fmt: skip

_SERVERS = {
    "kvern.v1.InferenceService": "router",
    "kvern.v1.RouterService": "router",
    "kvern.v1.TokenizerService": "tokenizer",
    "kvern.v1.ReplicaService": "detokenizer-0",
    "kvern.v1.EngineService": "engine-0",
}

_GENERATE = inference_pb2.GenerateRequest(
    text="Hello", stopping=inference_pb2.Stopping(max_tokens=2), sampling=inference_pb2.Sampling(temperature=0)
)
_SERVED = inference_pb2.GenerateRequest(
    request_id="a",
    model="smollm2",
    token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]),
    stopping=inference_pb2.Stopping(max_tokens=2),
    sampling=inference_pb2.Sampling(seed=1),
)
_ADD = engine_pb2.AddRequest(
    id=1,
    prompt_token_ids=[1, 2, 3],
    sampling=inference_pb2.Sampling(seed=1),
    stopping=inference_pb2.Stopping(max_tokens=2),
)

_RIGHT: list[Message] = [
    _GENERATE,
    inference_pb2.TokenizeRequest(text="Hello"),
    inference_pb2.DetokenizeRequest(ids=[1, 2]),
    inference_pb2.RouteRequest(request=_GENERATE),
    replica_pb2.ServeRequest(request=_SERVED),
    tokenizer_pb2.EncodePromptRequest(text="Hello"),
    tokenizer_pb2.DecodeTokensRequest(token_ids=[1, 2]),
    engine_pb2.ConnectRequest(add=_ADD),
]
"""Requests that nothing is wrong with, of the methods that read any."""


class Method(NamedTuple):
    """A method, and where it is served."""

    server: str
    descriptor: MethodDescriptor

    @property
    def path(self) -> str:
        return f"/{self.descriptor.containing_service.full_name}/{self.descriptor.name}"

    @property
    def right(self) -> Message:
        kind = GetMessageClass(self.descriptor.input_type)
        return next((message for message in _RIGHT if isinstance(message, kind)), kind())


def _services() -> Iterator[ServiceDescriptor]:
    for module in (engine_pb2, inference_pb2, replica_pb2, router_pb2, tokenizer_pb2):
        yield from module.DESCRIPTOR.services_by_name.values()


METHODS = [Method(_SERVERS[service.full_name], method) for service in _services() for method in service.methods]


@pytest.fixture(scope="module")
def channels(running_set: UpProcess) -> Iterator[dict[str, grpc.Channel]]:
    opened = {
        server: grpc.insecure_channel(f"unix:{running_set.sockets}/{server}.sock", options=CHANNEL_OPTIONS)
        for server in set(_SERVERS.values())
    }
    yield opened
    for channel in opened.values():
        channel.close()


@pytest.mark.timeout(7200 if NUM_INPUTS else 120)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.path)
def test_bad_input_is_the_callers_fault_and_leaves_the_services_as_they_were(
    method: Method, channels: dict[str, grpc.Channel], running_set: UpProcess
) -> None:
    before = running_set.children()

    @settings(
        max_examples=NUM_INPUTS // len(METHODS) or FEW,
        derandomize=not NUM_INPUTS,
        database=None,
        deadline=None,
        phases=[Phase.generate] if NUM_INPUTS == 0 else [Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(bad_messages(method.right), min_size=1, max_size=4 if method.descriptor.client_streaming else 1))
    def try_one(requests: list[Request]) -> None:
        code, details = _call(channels[method.server], method, [request.content for request in requests])
        assert code not in OUR_FAULT, (code, details)

    try_one()
    assert running_set.children() == before, "a service was restarted"
    with Client(running_set.listen) as client:
        answer = client.generate("The capital of France is", max_tokens=3, temperature=0)
        assert "".join(getattr(event, "text", "") for event in answer).strip().startswith("Paris")
    running_set.wait_idle()


def _call(channel: grpc.Channel, method: Method, requests: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """Call a method with bytes, take a few responses, and return how it ended."""
    descriptor = method.descriptor
    kind = (
        f"{'stream' if descriptor.client_streaming else 'unary'}_{'stream' if descriptor.server_streaming else 'unary'}"
    )
    call = getattr(channel, kind)(method.path)
    try:
        if not descriptor.server_streaming:
            call(requests[0], timeout=TIMEOUT_S)
        else:
            responses = call(iter(requests) if descriptor.client_streaming else requests[0], timeout=TIMEOUT_S)
            with closing(_Cancelled(responses)):
                list(itertools.islice(responses, MAX_RESPONSES))
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


class _Cancelled:
    """Cancels a call when closed."""

    def __init__(self, call: grpc.Call) -> None:
        self._call = call

    def close(self) -> None:
        self._call.cancel()
