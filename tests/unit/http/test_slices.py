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
