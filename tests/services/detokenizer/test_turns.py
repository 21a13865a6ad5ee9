"""Who writes in which turn of the event loop."""

from __future__ import annotations

import asyncio

from kvern.services.detokenizer.turns import WRITERS_PER_TURN, Turns


def writers(count: int) -> list[asyncio.Future[None]]:
    return [asyncio.get_running_loop().create_future() for _ in range(count)]


async def test_many_in_line_go_on_in_order_a_few_at_a_time() -> None:
    turns, line = Turns(), writers(2 * WRITERS_PER_TURN + 1)
    for writer in line:
        turns.line_up(writer)
    for num_done in (WRITERS_PER_TURN, 2 * WRITERS_PER_TURN, len(line)):
        await line[num_done - 1]
        assert [writer.done() for writer in line] == [True] * num_done + [False] * (len(line) - num_done)


async def test_first_in_line_goes_on_in_the_loops_next_round() -> None:
    turns, (writer,) = Turns(), writers(1)
    turns.line_up(writer)
    await asyncio.sleep(0)
    assert writer.done()


async def test_one_who_lines_up_again_is_last() -> None:
    turns, line = Turns(), writers(2 * WRITERS_PER_TURN)
    for writer in line:
        turns.line_up(writer)
    await line[0]
    [again] = writers(1)
    turns.line_up(again)
    await line[-1]
    assert not again.done()
    await again


async def test_writer_that_is_gone_when_its_turn_comes_holds_up_nobody() -> None:
    turns, (gone, next_one) = Turns(), writers(2)
    turns.line_up(gone)
    turns.line_up(next_one)
    gone.cancel()
    async with asyncio.timeout(20):
        await next_one
