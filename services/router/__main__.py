"""`python -m kvern.services.router`: one router process."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

from kvern.services.router.admin import ROUTER_SERVICE, RouterServicer
from kvern.services.router.admission import Admission
from kvern.services.router.choice import Policy
from kvern.services.router.digest_keys import DigestKeys
from kvern.services.router.discovery import Discovery, fixed_addresses
from kvern.services.router.identity.setup import open_identity
from kvern.services.router.index_reader import IndexReader
from kvern.services.router.limits import TenantLimits
from kvern.services.router.limits.shared_counts import SharedCounts
from kvern.services.router.metrics import RouterMetrics
from kvern.services.router.placement import Placer
from kvern.services.router.relay import Repeats
from kvern.services.router.replica_table import ReplicaTable
from kvern.services.router.servicer import INFERENCE_SERVICE, InferenceServicer, add_to_server
from kvern.services.router.settings import RouterSettings
from kvern.services.router.tokenizer import Tokenizer
from kvern.services.router.view import ReplicaStates, show_peers, show_streams
from kvern.services.runtime.health import WHOLE_FLEET
from kvern.services.runtime.process import run_service
from kvern.services.runtime.redis_index import open_redis
from kvern.services.runtime.server import GrpcServer
from kvern.services.runtime.settings import SettingsError
from kvern.services.runtime.status import Status
from kvern.services.runtime.ticket import TicketKeys
from kvern.services.runtime.tls import client_tls


async def main(settings: RouterSettings, status: Status) -> None:
    identity = open_identity(settings, status.registry)
    server = GrpcServer(settings, [INFERENCE_SERVICE, ROUTER_SERVICE], status, identity.admit)

    metrics, admission = RouterMetrics(status.registry), Admission(settings.max_streams)

    def on_change() -> None:
        metrics.know([*tokenizer.models, *(replica.model for replica in table if replica.model)])
        server.set_ready(tokenizer.is_serving and table.has_ready and digest_keys.has_right_tokenizer)
        server.set_health(WHOLE_FLEET, table.is_whole)

    tls = client_tls(settings)
    tickets = None if settings.ticket_key_file is None else TicketKeys(settings.ticket_key_file)
    tokenizer = Tokenizer(settings.tokenizer, on_change, tls)
    table = ReplicaTable(fixed_addresses(settings.replicas), on_change, settings.replica_authority, tls)
    digest_keys = DigestKeys(tokenizer, must_be_secret=settings.tenants is not None)
    table.allows = digest_keys.allows
    discovery = Discovery(settings.replicas, table)
    redis = None if settings.redis is None else open_redis(settings.redis, settings.redis_password_file)
    index = None if redis is None else IndexReader(redis, metrics.index)
    shared = None if redis is None else SharedCounts(redis)
    limits = TenantLimits(shared, identity.alias, settings.limit_budget_ms / 1e3, status.registry)
    show_streams(status.registry, admission)
    show_peers(status.registry, tokenizer, index)
    status.registry.register(ReplicaStates(table, lambda: metrics.models))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        policy, budget_s = Policy(settings.routing_policy), settings.index_budget_ms / 1e3
        placer = Placer(table, index, policy, budget_s, random.Random())
        inference = InferenceServicer(
            tokenizer,
            table,
            placer,
            Repeats(settings.hedge_after_s),
            admission,
            settings.max_stalled_s,
            metrics,
            limits,
            identity.salts,
            tickets,
        )
        add_to_server(inference, RouterServicer(table), server.grpc)
        await server.start()
        async with asyncio.TaskGroup() as tasks:
            views = [tokenizer.watch(), table.watch(), discovery.watch(), limits.watch(), *identity.watches]
            if index is not None:
                views.append(index.watch(table.set_registered))
            watchers = [tasks.create_task(view) for view in views]
            # The server drains before its watchers end: calls in flight still need a true view.
            async with stack.pop_all():
                await server.wait_for_stop()
            for watcher in watchers:
                watcher.cancel()
    await tokenizer.close()
    await table.close()
    if redis is not None:
        await redis.aclose()


if __name__ == "__main__":
    run_service("router", RouterSettings, main, expected_errors=(SettingsError,))
