"""Where requests go, over an index that holds what a test says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack

import pytest
import pytest_asyncio

from kvern.engine.block_hash import DIGEST_BYTES, extend_digests, root_digest
from kvern.services.router.choice import Policy
from kvern.services.router.models import Contract
from kvern.services.router.placement import Placement, Placer, Sent
from kvern.services.router.replica_table import ReplicaTable
from kvern.services.runtime.errors import Unavailable
from kvern.v1 import inference_pb2, replica_pb2

BLOCK_SIZE = 16
NUM_REPLICAS = 3
BUDGET_S = 0.005


class ExactIndex:
    """Which blocks each replica holds, by contract."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, str], set[bytes]] = {}
        self.budgets_s: list[float] = []

    def put(self, replica: str, contract: Contract, token_ids: Sequence[int]) -> None:
        digests = extend_digests(root_digest(contract.fingerprint), token_ids, contract.block_size)
        self.blocks.setdefault((replica, contract.fingerprint), set()).update(digests)

    async def match(self, model: str, contract: str, digests: bytes, budget_s: float) -> dict[str, int]:
        self.budgets_s.append(budget_s)
        chain = [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]
        held = {replica: blocks for (replica, own), blocks in self.blocks.items() if own == contract}
        return {replica: sum(digest in blocks for digest in chain) for replica, blocks in held.items()}


class Fleet:
    """Ready replicas of one model that no call reaches, and a placer over them."""

    def __init__(self, contracts: Sequence[Contract], policy: Policy = Policy.PREFIX) -> None:
        self.index = ExactIndex()
        self.names = [f"unix:/replica-{number}" for number in range(len(contracts))]
        self.table = ReplicaTable(self.names, lambda: None)
        self.placer = Placer(self.table, self.index, policy, BUDGET_S, random.Random(0))
        for replica, contract in zip(self.table, contracts, strict=True):
            replica.reachable, replica.state = True, replica_pb2.REPLICA_STATE_READY
            replica.engine = replica_pb2.EngineInfo(
                model="m", contract=contract.fingerprint, block_size=contract.block_size
            )

    async def place(self, token_ids: Sequence[int], **fields: object) -> Placement:
        """Do what the servicer does, with the tokenizer's part done here."""
        request = inference_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]
        digests = {
            contract: b"".join(extend_digests(root_digest(contract.fingerprint), token_ids, contract.block_size))
            for contract in self.placer.contracts(request, "m")
        }
        return await self.placer.place(request, "m", len(token_ids), digests, None)

    async def send(self, token_ids: Sequence[int], until: ExitStack, **fields: object) -> Sent:
        """Send a request to the best replica, where it stays until the stack is closed."""
        placement = await self.place(token_ids, **fields)
        candidate = placement.ranked()[0]
        self.table[candidate.address].num_in_flight += 1
        return until.enter_context(placement.sending(candidate))


ONE = Contract("one", BLOCK_SIZE)


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet([ONE] * NUM_REPLICAS)
    yield fleet
    await fleet.table.close()


async def test_replica_that_holds_the_prefix_comes_first(fleet: Fleet) -> None:
    prompt = range(500)
    fleet.index.put(fleet.names[1], ONE, prompt[:320])
    fleet.index.put(fleet.names[2], ONE, prompt[:160])
    ranked = (await fleet.place(prompt)).ranked()
    assert [each.address for each in ranked] == [fleet.names[1], fleet.names[2], fleet.names[0]]
    assert [(each.matched_tokens, each.uncached_tokens) for each in ranked] == [(320, 180), (160, 340), (0, 500)]
    assert [each.cost for each in ranked] == [180, 340, 500]


async def test_last_token_of_a_prompt_is_never_expected_to_be_cached(fleet: Fleet) -> None:
    prompt = range(4 * BLOCK_SIZE)
    fleet.index.put(fleet.names[0], ONE, prompt)
    assert (await fleet.place(prompt)).ranked()[0].matched_tokens == 4 * BLOCK_SIZE - 1


async def test_hundred_requests_of_one_cached_prefix_spill_by_load(fleet: Fleet) -> None:
    """F08."""
    prefix = range(1000, 1000 + 32 * BLOCK_SIZE)
    fleet.index.put(fleet.names[0], ONE, prefix)
    with ExitStack() as until:
        sent = [await fleet.send([*prefix, number], until) for number in range(100)]
    counts = Counter(each.candidate.address for each in sent)
    assert sent[0].candidate.address == fleet.names[0]
    assert min(counts[name] for name in fleet.names) >= 20


async def test_thirty_requests_of_one_cold_prefix_are_computed_in_few_places() -> None:
    """F09."""
    fleet = Fleet([ONE] * 16)
    prefix = range(1000, 1000 + 64 * BLOCK_SIZE)
    with ExitStack() as until:
        sent = [await fleet.send([*prefix, number], until) for number in range(30)]
    assert len([each for each in sent if each.candidate.matched_tokens == 0]) <= 3
    await fleet.table.close()


async def test_prefix_on_its_way_is_forgotten_when_its_request_fails(fleet: Fleet) -> None:
    prompt = range(10 * BLOCK_SIZE)
    with ExitStack() as until:
        await fleet.send(prompt, until)
        assert max(each.matched_tokens for each in (await fleet.place(prompt)).ranked()) == 10 * BLOCK_SIZE - 1
    assert [each.matched_tokens for each in (await fleet.place(prompt)).ranked()] == [0, 0, 0]


async def test_prompts_shorter_than_a_block_are_spread(fleet: Fleet) -> None:
    """F10."""
    with ExitStack() as until:
        sent = [await fleet.send([7] * (BLOCK_SIZE - 1), until) for _ in range(12)]
    assert Counter(each.candidate.address for each in sent) == dict.fromkeys(fleet.names, 4)
    assert fleet.index.budgets_s == []


async def test_replicas_of_different_contracts_never_count_each_others_blocks() -> None:
    """F21: two models of one name with different weights, and block sizes."""
    other = Contract("other", 2 * BLOCK_SIZE)
    fleet = Fleet([ONE, ONE, other])
    prompt = range(8 * BLOCK_SIZE + 1)
    fleet.index.put(fleet.names[0], ONE, prompt)
    # As after a restart under the same name: what was indexed under another contract says nothing.
    fleet.index.put(fleet.names[2], ONE, prompt)
    matched = {each.address: each.matched_tokens for each in (await fleet.place(prompt)).ranked()}
    assert matched == {fleet.names[0]: 8 * BLOCK_SIZE, fleet.names[1]: 0, fleet.names[2]: 0}
    fleet.index.put(fleet.names[2], other, prompt[: 4 * BLOCK_SIZE])
    placement = await fleet.place(prompt)
    assert {each.address: each.matched_tokens for each in placement.ranked()}[fleet.names[2]] == 4 * BLOCK_SIZE
    with placement.sending(placement.ranked()[0]):
        matched = {each.address: each.matched_tokens for each in (await fleet.place(prompt)).ranked()}
        assert matched[fleet.names[2]] == 4 * BLOCK_SIZE
    await fleet.table.close()


@pytest.mark.parametrize(
    "fields",
    [{"cache": inference_pb2.Cache(bypass=True)}, {"output": inference_pb2.Output(prompt_logprobs=0)}],
    ids=["bypass", "prompt_logprobs"],
)
async def test_request_that_reuses_nothing_asks_nothing(fleet: Fleet, fields: dict[str, object]) -> None:
    prompt = range(100)
    fleet.index.put(fleet.names[0], ONE, prompt)
    ranked = (await fleet.place(prompt, **fields)).ranked()
    assert [each.matched_tokens for each in ranked] == [0, 0, 0]
    assert fleet.index.budgets_s == []


async def test_request_that_leaves_nothing_behind_attracts_no_others(fleet: Fleet) -> None:
    prompt = range(100)
    with ExitStack() as until:
        await fleet.send(prompt, until, cache=inference_pb2.Cache(no_store=True))
        assert [each.matched_tokens for each in (await fleet.place(prompt)).ranked()] == [0, 0, 0]


async def test_lookup_may_take_its_budget_or_what_the_deadline_leaves(fleet: Fleet) -> None:
    request, digests = inference_pb2.GenerateRequest(), {ONE: bytes(DIGEST_BYTES)}
    for time_remaining_s in (None, 60.0, BUDGET_S / 2):
        await fleet.placer.place(request, "m", BLOCK_SIZE, digests, time_remaining_s)
    assert fleet.index.budgets_s == [BUDGET_S, BUDGET_S, BUDGET_S / 2]


async def test_replicas_left_out_are_not_chosen_and_none_left_is_unavailable(fleet: Fleet) -> None:
    placement = await fleet.place(range(100))
    assert [each.address for each in placement.ranked(without=set(fleet.names[:2]))] == fleet.names[2:]
    with pytest.raises(Unavailable, match="'m'"):
        placement.ranked(without=set(fleet.names))


async def test_own_requests_count_at_once_and_their_prompts_until_the_first_token(fleet: Fleet) -> None:
    with ExitStack() as until:
        sent = await fleet.send(range(100), until)
        address = sent.candidate.address

        async def queued() -> int:
            ranked = (await fleet.place([1] * 8)).ranked()
            assert ranked[-1].address == address
            return ranked[-1].queued_tokens

        assert await queued() == 100
        sent.take(replica_pb2.ServeResponse(cached_tokens=32))
        assert (await queued(), sent.cached_tokens, sent.is_computed) == (100, 32, False)
        sent.take(replica_pb2.ServeResponse(updates=[replica_pb2.ChoiceUpdate(new_token_ids=[1])]))
        assert (await queued(), sent.is_computed) == (0, True)


async def test_metadata_explains_the_choice_in_less_than_a_kibibyte(fleet: Fleet) -> None:
    prompt = range(100)
    fleet.index.put(fleet.names[1], ONE, prompt)
    placement = await fleet.place(prompt)
    with placement.sending(placement.ranked()[0]):
        pass
    metadata = dict(placement.metadata(fleet.names[1]))
    assert float(metadata.pop("kvern-load-age-s")) >= 0
    assert metadata == {
        "kvern-policy": "prefix",
        "kvern-matched-tokens": "96",
        "kvern-cost": "uncached=4 queued=0 decode=0",
    }
    assert placement.metadata(fleet.names[0]) == ()


@pytest.mark.parametrize("policy", [policy for policy in Policy if policy is not Policy.PREFIX])
async def test_other_policies_ask_nothing(policy: Policy) -> None:
    fleet = Fleet([ONE] * NUM_REPLICAS, policy)
    assert len((await fleet.place(range(100))).ranked()) == NUM_REPLICAS
    assert fleet.index.budgets_s == []
    await fleet.table.close()
