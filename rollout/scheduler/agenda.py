"""`Agenda`: the work that is pending between two steps.

    a verb came, another thread has ended    `call(work)`: in this turn, or in the next one
    a deadline                               `call_at(work, seconds)`: in the first turn at that time or later
    work that goes on                        `call(work)` by the work itself: in the next turn, too

A turn in which nothing is pending costs one check.  If all ranks have to act in one turn, they must make work pending
in one turn: for a message or a time, which they share.  The end of a thread of one rank is no such event: the work is
pending on every rank until all agree that the thread has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rollout.scheduler.channel import Channel

Work = Callable[[], None]


class Agenda:
    """`order`: all possible work, in the order in which it is done within a turn.

    `channel` has the clock, which all ranks of the engine share.
    """

    def __init__(self, channel: Channel) -> None:
        self.order: Sequence[Work] = ()
        self._channel = channel
        self._pending: set[Work] = set()
        self._deadlines: dict[Work, float] = {}
        self._next_deadline = math.inf

    def call(self, work: Work) -> None:
        """Do `work` once, in its place in the order.  May be called from any thread, and again before it is done."""
        assert work in self.order, f"{work} has no place in the order"
        self._pending.add(work)

    def call_at(self, work: Work, deadline: float) -> None:
        """Do `work` once the clock shows `deadline`, in seconds.  It replaces the last one; `math.inf` removes it."""
        assert work in self.order, f"{work} has no place in the order"
        self._deadlines[work] = deadline
        self._next_deadline = min(self._deadlines.values())

    def run(self) -> None:
        """Do all pending work.  Called once a turn, after its messages were handled.

        Work that makes work pending which is later in the order has it done in the same turn.
        """
        if self._next_deadline < math.inf and self._channel.now >= self._next_deadline:
            self._note_deadlines(self._channel.now)
        if self._pending:
            for work in self.order:
                if work in self._pending:
                    self._pending.remove(work)  # first, so that it may call for itself again
                    work()

    def _note_deadlines(self, now: float) -> None:
        for work, deadline in list(self._deadlines.items()):
            if deadline <= now:
                self.call_at(work, math.inf)
                self._pending.add(work)
