"""What is told of blocks beside their digests: their token ids, of one salt alone."""

from __future__ import annotations

from array import array

from kvern.engine.block_pool import CacheEvent

from .scheduler_harness import BLOCK_SIZE, Engine


def added(engine: Engine) -> list[CacheEvent]:
    return [event for event in engine.pool.take_events() if event.is_added]


def test_blocks_of_the_told_salt_come_with_parent_and_token_ids() -> None:
    engine = Engine(told_salt="door")
    request = engine.add([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="door")
    engine.run()
    events = added(engine)
    assert len(events) == (len(request.token_ids) - 1) // BLOCK_SIZE
    for number, event in enumerate(events):
        assert event.content is not None
        assert event.content.parent == (events[number - 1].digest if number else None)
        start = number * BLOCK_SIZE
        assert list(array("I", event.content.token_ids)) == request.token_ids[start : start + BLOCK_SIZE]


def test_blocks_of_other_salts_are_told_without_content() -> None:
    engine = Engine(told_salt="door")
    engine.add(list(range(9)), salt="tenant")
    engine.add(list(range(9)))
    engine.run()
    assert [event.content for event in added(engine)] == [None] * 6


def test_nothing_is_told_of_blocks_unless_it_is_asked_for() -> None:
    engine = Engine()
    engine.add(list(range(9)))
    engine.run()
    assert [event.content for event in added(engine)] == [None] * 3
