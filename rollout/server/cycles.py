"""The search for cycles of Python's objects, in parts that hold the event loop for few milliseconds.

Python searches once there are some thousand objects more than at the last search.  Where answers leave as requests
come, that may take a second, and then all objects of thousands of requests are new: with 4,096 in flight a search took
27 ms.
"""

from __future__ import annotations

import asyncio
import gc

COLLECT_AFTER = 5_000
"""Growth of the number of objects after which Python itself looks for cycles among the new ones.

With Python's 700, a request would cause a search every time.
"""
MIDDLE_AFTER = 1_000
"""Searches among new objects after which the rest of them is visited: with 4,096 requests in flight that is 100 ms."""
FULL_AFTER = 20
"""Searches of the middle generation after which all is visited: at 4,096 requests in flight 480,000 objects."""
SEARCH_EVERY_S = 0.05


def prepare() -> None:
    """Leave alone what exists now, as it stays: no search between two requests need visit it."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, MIDDLE_AFTER, FULL_AFTER)


async def search_for_ever() -> None:
    """Search every `SEARCH_EVERY_S`, until cancelled."""
    while True:
        await asyncio.sleep(SEARCH_EVERY_S)
        search()


def search() -> None:
    """Search among the new objects, and among older ones if that is due; not while a body's objects are made."""
    if not gc.isenabled():
        return
    _, middle, full = gc.get_count()  # the first grows no more once answers leave as requests come
    gc.collect(2 if full > FULL_AFTER else 1 if middle > MIDDLE_AFTER else 0)
