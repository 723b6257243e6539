"""`Slices` do all work, in order, and leave the event loop to others in between."""

from __future__ import annotations

import asyncio
import time

import pytest

from rollout.http import slices
from rollout.http.slices import Slices


def passes_of_others(num_pieces: int) -> tuple[list[int], int]:
    """Return the order in which pieces of a millisecond ran, and how many passes of the loop another task had."""

    async def scenario() -> tuple[list[int], int]:
        work, order, passes = Slices(), [], 0

        def piece(number: int) -> None:
            time.sleep(0.001)
            order.append(number)
            if number == 0:
                work.add(lambda: order.append(num_pieces))  # what comes meanwhile is last

        for number in range(num_pieces):
            work.add(lambda number=number: piece(number))  # type: ignore[misc]
        while len(order) <= num_pieces:
            await asyncio.sleep(0)
            passes += 1
        return order, passes

    return asyncio.run(asyncio.wait_for(scenario(), 30.0))


def test_pieces_run_in_order_and_others_get_their_turn() -> None:
    order, passes = passes_of_others(50)
    assert order == list(range(51))
    assert passes >= 50 / (slices.SLICE_S / 0.001 + 1)


def test_one_slice_of_everything_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 30.0)
    _, passes = passes_of_others(50)
    assert passes < 5


def test_an_error_of_a_piece_leaves_the_others_their_turn() -> None:
    async def scenario() -> list[int]:
        work, order, errors = Slices(), [], []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
        work.add(lambda: order.append(1 // 0))
        for number in (1, 2):
            work.add(lambda number=number: order.append(number))  # type: ignore[misc]
        await asyncio.sleep(0.01)
        work.add(lambda: order.append(3))
        await asyncio.sleep(0.01)
        assert [type(error) for error in errors] == [ZeroDivisionError]
        return order

    assert asyncio.run(scenario()) == [1, 2, 3]
