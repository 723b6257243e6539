"""`KnownCalls`: what was made of calls that are the same in each refresh, such as their tensors."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar


class _Pauses:
    """Blocks on any threads in which Python does not look for cycles.  The last one to end lets it look again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way, self._was_enabled = 0, False

    def begin(self) -> None:
        with self._lock:
            if self._under_way == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._under_way += 1

    def end(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0 and self._was_enabled:
                gc.enable()


_PAUSES = _Pauses()  # one for the process, as its collector is


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python from looking for cycles: it would visit a million new objects again and again, and there are none."""
    _PAUSES.begin()
    try:
        yield
    finally:
        _PAUSES.end()


class _Sized(Protocol):
    """A call that was read: `num_tensors` of it are kept in memory."""

    @property
    def num_tensors(self) -> int: ...


Call = TypeVar("Call", bound=_Sized)


def _size(call: _Sized) -> int:
    """Return how many tensors a kept call counts for: one without any takes memory, too."""
    return max(call.num_tensors, 1)


class KnownCalls(Generic[Call]):
    """Calls that were read, by a key of their arguments, such as a digest of them.

    The ones used last are kept, with at most `max_tensors` tensors together.
    """

    def __init__(self, max_tensors: int) -> None:
        self._max_tensors = max_tensors
        self._num_tensors = 0
        self._calls: OrderedDict[Hashable, Call] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Call]) -> Call:
        """Return the call, made if it is not known.  What `make` raises is not kept."""
        known = self._calls.get(key)
        if known is not None:
            self._calls.move_to_end(key)
            return known
        with without_collections():
            made = self._calls[key] = make()
        self._num_tensors += _size(made)
        while self._num_tensors > self._max_tensors and len(self._calls) > 1:
            _, oldest = self._calls.popitem(last=False)
            self._num_tensors -= _size(oldest)
        return made
