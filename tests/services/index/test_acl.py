"""The rules of Redis's users that the chart holds, on real servers: what each role does works, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from kvern.services.runtime.redis_index import open_redis
from kvern.services.runtime.redis_index.keys import ReplicaKeys, Shard
from tests.services.index.indexed_pool import IndexedPool, matches, new_reader, prompt_digests, settled
from tests.services.index.redis_servers import REDIS_6, REDIS_7, RedisServer, wait_for

RULES = Path(__file__).parents[3] / "helm" / "kvern" / "redis"
SERVERS = {"6.2": REDIS_6} | ({"7": REDIS_7} if REDIS_7 else {})
ROLES = ("router", "engine")
KEYS = ReplicaKeys.of(Shard("pool", 0), "replica", 1)
PROMPT = prompt_digests(range(40))


def rules(role: str, executable: str) -> list[str]:
    """Return a role's rules, without those in parentheses for a server that knows none."""
    text = (RULES / f"{role}.acl").read_text()
    if executable == REDIS_6:
        text = text.partition("(")[0]
    words, _, selector = text.strip().partition(" (")
    return [*words.split(), *([f"({selector}"] if selector else [])]


@dataclass(frozen=True)
class Server:
    """A server with the users of both roles."""

    executable: str
    port: int
    scheme: str

    def url(self, role: str) -> str:
        return f"{self.scheme}://{role}@127.0.0.1:{self.port}"

    def refuses(self, role: str, *command: str) -> bool:
        """Whether a command is refused for who gives it. Within a script it is an error of the script's."""
        with redis.Redis(port=self.port, username=role, password=f"{role} secret", protocol=2) as client:
            try:
                client.execute_command(*command)
            except redis.ResponseError as error:
                return re.search("permission|can't access|can't run", str(error)) is not None
        return False


@pytest.fixture(scope="module", params=[(name, kind) for name in SERVERS for kind in ("single", "cluster")], ids=str)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    name, kind = request.param
    executable = SERVERS[name]
    is_cluster = kind == "cluster"
    flags = ("--cluster-enabled", "yes") if is_cluster else ()
    with RedisServer(tmp_path_factory.mktemp("redis"), *flags, executable=executable) as running:
        for role in ROLES:
            running.command("ACL", "SETUSER", role, "on", f">{role} secret", *rules(role, executable))
        if is_cluster:
            running.command("CLUSTER", "ADDSLOTS", *range(16384))
            wait_for(lambda: b"cluster_state:ok" in running.command("CLUSTER", "INFO"))
        yield Server(executable, running.port, "redis+cluster" if is_cluster else "redis")


async def test_engine_writes_the_index_and_router_reads_it(server: Server, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        clients = {}
        for role in ROLES:
            (tmp_path / role).write_text(f"{role} secret\n")
            clients[role] = open_redis(server.url(role), tmp_path / role)
            stack.push_async_callback(clients[role].aclose)
        reader = new_reader(clients["router"])
        async with IndexedPool(clients["engine"]) as replica:
            replica.serve(PROMPT)
            await settled(reader, PROMPT, replica)
            assert await matches(reader, PROMPT) == {replica.replica: len(PROMPT)}
        await replica.writer.close()
        assert await reader.refresh() == {}


FORBIDDEN = [
    ("FLUSHALL",),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("CONFIG", "GET", "*"),
    ("ACL", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("PUBLISH", "channel", "message"),
    ("GET", "another's"),
    ("EVAL", "return redis.call('GET', KEYS[1])", "1", "another's"),
]


@pytest.mark.parametrize("role", ROLES)
def test_no_role_can_do_what_none_needs(server: Server, role: str) -> None:
    assert [command for command in FORBIDDEN if not server.refuses(role, *command)] == []


def test_router_cannot_write_the_index(server: Server) -> None:
    write = "return redis.call('HSET', KEYS[1], 'replica', '{}')"
    assert server.refuses("router", "HSET", KEYS.registry, "replica", "{}")
    assert server.refuses("router", "EVAL", write, "1", KEYS.registry)
    assert server.refuses("router", "UNLINK", KEYS.blocks)


def test_router_keeps_tenants_limits_and_engine_cannot_see_them(server: Server) -> None:
    if server.executable == REDIS_6:
        pytest.skip("this server knows no rules in parentheses")
    key = "kvern:limits:{mill}:leases:generate"
    count = "redis.call('ZADD', KEYS[1], redis.call('TIME')[1], 'r') redis.call('PEXPIRE', KEYS[1], 1000)"
    for command in (("EVAL", f"{count} return redis.call('ZCARD', KEYS[1])", "1", key), ("ZREM", key, "r")):
        assert not server.refuses("router", *command)
        assert server.refuses("engine", *command)
