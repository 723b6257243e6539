"""Ranks that break one rule each, for the suite of stopped ranks to catch: called in each process before it starts.

Knows the engine's inner parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.control import rank_consensus
from rollout.control.rank_consensus import PeerRankError, RankConsensus
from rollout.distributed.communicator import Communicator, RankLostError
from rollout.distributed.parallel import Parallel


def a_vote_that_raises_is_a_no() -> None:
    """The old weights are put back, and the rank serves on; nobody compares versions."""
    vote = RankConsensus.commit_vote

    def wrong(self: RankConsensus, mine: bool) -> bool:
        try:
            return vote(self, mine)
        except RankLostError:
            return False

    RankConsensus.commit_vote = wrong  # type: ignore[method-assign]
    rank_consensus.VerbMark.__eq__ = lambda self, other: True  # type: ignore[method-assign,assignment]
    _survives_lost_groups()


def serves_on_after_a_lost_exchange() -> None:
    """It is told as the failure of the verb, and the engine can never be refreshed again."""
    run = RankConsensus.run

    def wrong(self: RankConsensus, *arguments: Any) -> Any:
        try:
            return run(self, *arguments)
        except RankLostError as error:
            raise PeerRankError(str(error), 500) from None

    RankConsensus.run = wrong  # type: ignore[method-assign]
    _survives_lost_groups()


def _survives_lost_groups() -> None:
    Parallel.require_whole = lambda self: None  # type: ignore[method-assign]
    lost = Communicator._lost

    def forgetting(self: Communicator, verb: str, error: RuntimeError) -> RankLostError:
        raised = lost(self, verb, error)
        if self.name == "world":
            self.broken = None
        return raised

    Communicator._lost = forgetting  # type: ignore[method-assign]


WRONG_RANKS: dict[str, Callable[[], None]] = {
    wrong.__name__: wrong for wrong in (a_vote_that_raises_is_a_no, serves_on_after_a_lost_exchange)
}
