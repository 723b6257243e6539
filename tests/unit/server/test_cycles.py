"""Cycles of new objects are found again and again, older ones are looked at as rarely as is stated."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from rollout.server import cycles


class Node:
    """An object of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


def lost_cycle() -> weakref.ref[Node]:
    """Make a cycle that nothing holds."""
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


@pytest.fixture
def rare() -> Iterator[None]:
    """Keep Python from searching by itself."""
    before = gc.get_threshold()
    gc.set_threshold(1 << 30, 1 << 30, 1 << 30)
    yield
    gc.set_threshold(*before)


def test_new_cycles_are_found_again_and_again(rare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "SEARCH_EVERY_S", 0.001)

    async def scenario() -> None:
        searching = asyncio.create_task(cycles.search_for_ever())
        async with asyncio.timeout(20.0):
            for _ in range(3):
                lost = lost_cycle()
                assert lost() is not None
                while lost() is not None:
                    await asyncio.sleep(0)
        searching.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("counts", "generation"),
    [
        ((10_000, 0, 0), 0),
        ((0, cycles.MIDDLE_AFTER, cycles.FULL_AFTER), 0),
        ((0, cycles.MIDDLE_AFTER + 1, cycles.FULL_AFTER), 1),
        ((0, cycles.MIDDLE_AFTER + 1, cycles.FULL_AFTER + 1), 2),
    ],
)
def test_older_objects_are_visited_when_it_is_due(
    counts: tuple[int, int, int], generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "get_count", lambda: counts)
    monkeypatch.setattr(gc, "collect", collected.append)
    cycles.search()
    assert collected == [generation]


def test_nothing_is_searched_while_another_thread_makes_many_objects(rare: None) -> None:
    gc.disable()
    try:
        lost = lost_cycle()
        cycles.search()
        assert lost() is not None
    finally:
        gc.enable()
    cycles.search()
    assert lost() is None
