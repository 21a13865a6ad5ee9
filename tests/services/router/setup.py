"""A router process whose tokenizer and replicas do what a test says, shared by the tests of one module."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.v1 import inference_pb2, inference_pb2_grpc, replica_pb2, router_pb2, router_pb2_grpc

from . import scripted
from .scripted import ScriptedReplica, ScriptedTokenizer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MAX_STREAMS = 8
NUM_REPLICAS = 4


@dataclass
class Setup:
    """A router, its peers, and stubs to it."""

    tokenizer: ScriptedTokenizer
    replicas: list[ScriptedReplica]
    inference: inference_pb2_grpc.InferenceServiceAsyncStub
    router: router_pb2_grpc.RouterServiceAsyncStub
    health: health_pb2_grpc.HealthStub
    log: Path
    status: str
    """Where it tells its metrics."""
    calls: list[Call] = field(default_factory=list)
    """Those to Generate since the last reset."""

    async def reset(self) -> None:
        """End what the last test left open, and make peers, and what the router thinks of them, as new."""
        while self.calls:
            self.calls.pop().cancel()
        self.tokenizer.failures, self.tokenizer.hangs = 0, False
        await self.tokenizer.set_serving(True)
        failed = [replica for replica in self.replicas if replica.has_failed]
        for replica in self.replicas:
            replica.reset()
        await self.poll()
        await self.health_becomes(SERVING)
        await self.all_ready()
        if failed:
            await self._close_circuits(failed)

    async def _close_circuits(self, failed: list[ScriptedReplica]) -> None:
        """Let each of these answer a call, or the router would take the next one for a probe of an open circuit."""
        async with asyncio.timeout(20):
            while not all(replica.received for replica in failed):
                assert [response async for response in self.generate()]
        for replica in self.replicas:
            replica.reset()

    async def poll(self) -> None:
        """Have the router ask its replicas at once what they are, of which it would hear within a second."""
        for replica in self.replicas:
            is_draining = replica.state == replica_pb2.REPLICA_STATE_DRAINING
            request = router_pb2.DrainReplicaRequest(replica=replica.address, undo=not is_draining)
            await self.router.DrainReplica(request)

    async def statuses(self, is_right: Callable[[list[router_pb2.ReplicaStatus]], bool]) -> None:
        """Wait until the router sees its replicas so."""
        seen = router_pb2.ListReplicasResponse()
        try:
            async with asyncio.timeout(30):
                while not seen.replicas or not is_right(list(seen.replicas)):
                    await asyncio.sleep(0.02)
                    seen = await self.router.ListReplicas(router_pb2.ListReplicasRequest())
        except TimeoutError:
            pytest.fail(f"the router sees\n{seen}and logged\n{self.log.read_text()[-4000:]}")

    async def all_ready(self) -> None:
        await self.statuses(lambda statuses: all(is_ready(status) and not status.num_in_flight for status in statuses))

    async def arrived(self, num_requests: int) -> None:
        """Wait until so many requests have come to replicas: what the router has sent may be on its way still."""
        async with asyncio.timeout(30):
            while len(self.received()) < num_requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def use(self, *replicas: ScriptedReplica) -> None:
        """Wait until only these are in the choice."""
        for replica in self.replicas:
            used = replica in replicas
            replica.state = replica_pb2.REPLICA_STATE_READY if used else replica_pb2.REPLICA_STATE_DRAINING
        await self.poll()
        wanted = {replica.address for replica in replicas}
        await self.statuses(lambda all_: {each.address for each in all_ if is_ready(each)} == wanted)

    async def health_becomes(self, wanted: int) -> None:
        call = self.health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        async for response in call:
            if response.status == wanted:
                break
        call.cancel()

    def generate(self, text: str = "Hi", timeout: float | None = 20, **fields: object) -> Call:
        request = inference_pb2.GenerateRequest(text=text, **fields)  # type: ignore[arg-type]
        self.calls.append(self.inference.Generate(request, timeout=timeout))
        return self.calls[-1]

    def behave(self, behaviour: scripted.Behaviour) -> None:
        for replica in self.replicas:
            replica.behaviour = behaviour

    @property
    def chosen(self) -> ScriptedReplica:
        """The one replica that a request came to."""
        [replica] = [replica for replica in self.replicas if replica.received]
        return replica

    def received(self) -> list[inference_pb2.GenerateRequest]:
        return [request for replica in self.replicas for request in replica.received]


Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


def is_ready(status: router_pb2.ReplicaStatus) -> bool:
    return status.reachable and status.state == replica_pb2.REPLICA_STATE_READY
