"""`until_disconnect`: who ends a wait for an answer, and what the waiting handler learns of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout.http.io import ClientGone, until_disconnect


async def client_stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("never")


async def client_leaves() -> dict[str, Any]:
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


class Work:
    """Waits for ever; `was_cancelled` once it has been cleaned up."""

    def __init__(self) -> None:
        self.was_cancelled = False

    async def __call__(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.was_cancelled = True


def test_the_result_of_work_that_waits_and_of_work_that_does_not() -> None:
    async def waits() -> str:
        await asyncio.sleep(0.01)
        return "late"

    async def returns() -> str:
        return "at once"

    async def run() -> None:
        for work in (waits, returns):
            assert await until_disconnect({}, client_stays, work()) in ("late", "at once")
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "what watched the client has ended"

    asyncio.run(run())


def test_a_client_that_leaves_cancels_the_work() -> None:
    async def run() -> None:
        work = Work()
        with pytest.raises(ClientGone):
            await until_disconnect({}, client_leaves, work())
        assert work.was_cancelled
        await asyncio.sleep(0.02)  # the task is not cancelled any more

    asyncio.run(run())


def test_a_handler_that_is_cancelled_is_not_told_that_its_client_left() -> None:
    async def run() -> None:
        work = Work()
        handler = asyncio.create_task(until_disconnect({}, client_stays, work()))
        await asyncio.sleep(0.01)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        assert work.was_cancelled

    asyncio.run(run())


def test_an_error_of_the_work_is_raised() -> None:
    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("bad")

    async def run() -> None:
        with pytest.raises(ValueError, match="bad"):
            await until_disconnect({}, client_stays, fails())

    asyncio.run(run())
