"""`LoopThread`: an event loop on a thread of its own, for blocking callers of coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
_CANCEL_S = 5.0
"""Most seconds for a cancelled coroutine to close its connections."""


class LoopThread:
    """Runs coroutines for callers on any thread.  A caller that is interrupted (Ctrl-C) cancels its coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and return its result.  An interrupt cancels it and waits until it has ended."""
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            ended.wait(_CANCEL_S)
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield the items as they come.  Closing the iterator, or an interrupt, closes `items`."""
        try:
            while (item := self.run(_next(items))) is not None:
                yield item
        finally:
            self.run(items.aclose())

    def close(self) -> None:
        """Cancel the coroutines that still run, and stop."""
        if self._thread.is_alive():
            self.run(_cancel_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _next(items: AsyncGenerator[T, None]) -> T | None:
    return await anext(items, None)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
