"""`WaitingQueue`: the requests that wait, in the order in which they begin.

    retracted ones | priority 0: first come, first served | priority 1: ... | ...

Adding a request and removing one from anywhere take the same time, however many wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from rollout.scheduler.req import Req


class WaitingQueue:
    """The waiting requests: requests that were retracted stay in front; then a lower `priority` value goes first."""

    def __init__(self) -> None:
        self._begun: OrderedDict[Req, None] = OrderedDict()
        self._new: dict[int, OrderedDict[Req, None]] = {}  # by priority; none of them is empty
        self._priorities: list[int] = []  # the keys, ascending
        self._num_new = 0
        self.num_tokens = 0  # of all that wait, prompts and outputs

    @property
    def num_begun(self) -> int:
        """The number of waiting requests that ran before."""
        return len(self._begun)

    def __len__(self) -> int:
        return len(self._begun) + self._num_new

    def __iter__(self) -> Iterator[Req]:
        yield from self._begun
        for priority in self._priorities:
            yield from self._new[priority]

    def __contains__(self, req: Req) -> bool:
        return req in self._begun or req in self._new.get(req.source.priority, ())

    def __getitem__(self, index: int) -> Req:
        """Return the request that begins after `index` others.  The first one takes constant time."""
        line: Iterable[Req] = self if index else self._first_line()
        found = next(islice(line, index, None), None)
        if found is None:
            raise IndexError(index)
        return found

    def append(self, req: Req) -> None:
        """Add `req` behind its equals."""
        self._line_of(req)[req] = None
        self._num_new += not req.has_begun
        self.num_tokens += req.num_tokens

    def appendleft(self, req: Req) -> None:
        """Add `req` in front of its equals.  A request that has begun goes in front of all."""
        self.append(req)
        self._line_of(req).move_to_end(req, last=False)

    def popleft(self) -> Req:
        """Remove the first request.  Raises `IndexError` if none waits."""
        req = self[0]
        self._remove(req, self._first_line())
        return req

    def discard(self, req: Req) -> bool:
        """Remove `req`.  Returns False if it does not wait."""
        if req not in self:
            return False
        self._remove(req, self._line_of(req))
        return True

    def _remove(self, req: Req, line: OrderedDict[Req, None]) -> None:
        del line[req]
        self.num_tokens -= req.num_tokens
        if line is not self._begun:
            self._num_new -= 1
            if not line:
                del self._new[req.source.priority]
                del self._priorities[bisect_left(self._priorities, req.source.priority)]

    def _first_line(self) -> OrderedDict[Req, None]:
        """Return the line of the request that begins first; an empty one if none waits."""
        if self._begun or not self._priorities:
            return self._begun
        return self._new[self._priorities[0]]

    def _line_of(self, req: Req) -> OrderedDict[Req, None]:
        """Return the requests among which `req` keeps the order of arrival."""
        if req.has_begun:
            return self._begun
        priority = req.source.priority
        if priority not in self._new:
            self._new[priority] = OrderedDict()
            insort(self._priorities, priority)
        return self._new[priority]
