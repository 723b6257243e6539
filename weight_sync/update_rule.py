"""`RULE`: what a call that brings tensors does, by the state of the engine and the call's relation to the open update.

It makes updates of the calls of clients that send neither begin nor end.  `WeightUpdater.relation` finds the relation,
and the engine's control of weight verbs reads the table.  docs/reference/weights/index.md shows it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from weight_sync.ledger import Coverage


class Engine(enum.Enum):
    """The state of the engine when a call comes."""

    PAUSED = "paused, or about to be"
    RUNNING = "running"
    EMPTY = "running without content: the weights' memory was released"


class Relation(enum.Enum):
    """The relation of a call that brings tensors to the update that is open."""

    FIRST = "without id, none is open"
    LOST = "without id, none is open, and one was lost since the last new start"
    NEW_PAUSE = "without id, the open one was left by a client without begin at an earlier pause"
    JOINED = "without id, of the open one, which has no begin"
    SAME = "with the id of the open one, which has no begin"
    BEGUN = "of the open one, which has a begin"
    FOREIGN = "of another update"


class Deed(NamedTuple):
    """The effect of a call.  `opens`: an update is opened with that coverage, and one that is open is dropped.

    `settles`: which call commits the update.
    """

    effect: str
    opens: Coverage | None = None
    settles: Literal["a later call", "this call", "the call that completes it"] = "a later call"
    refused: bool = False


REFUSE = Deed("a 409 that changes nothing", refused=True)
JOIN = Deed("joins the open update; a later call settles it")
OPEN = Deed("opens an update of all tensors, which `continue_generation` settles", "full")
ALONE = Deed("is an update of its own, of the tensors that it names", "partial", "this call")
OPEN_SUM = Deed(
    "opens an update of all tensors; the call that completes it settles it, and a failure drops it",
    "full",
    "the call that completes it",
)
JOIN_SUM = Deed(
    "joins the open update; the call that completes it settles it, and a failure drops it",
    settles="the call that completes it",
)


def _rows(relation: Relation, paused: Deed, running: Deed, empty: Deed) -> dict[tuple[Engine, Relation], Deed]:
    return {(Engine.PAUSED, relation): paused, (Engine.RUNNING, relation): running, (Engine.EMPTY, relation): empty}


RULE: Mapping[tuple[Engine, Relation], Deed] = MappingProxyType(
    #                          PAUSED   RUNNING  EMPTY
    _rows(Relation.FIRST, OPEN, ALONE, OPEN_SUM)
    | _rows(Relation.LOST, OPEN, REFUSE, REFUSE)
    | _rows(Relation.NEW_PAUSE, OPEN, ALONE, OPEN_SUM)
    | _rows(Relation.JOINED, JOIN, JOIN, JOIN_SUM)
    | _rows(Relation.SAME, JOIN, JOIN, JOIN_SUM)
    | _rows(Relation.BEGUN, JOIN, JOIN, JOIN)
    | _rows(Relation.FOREIGN, REFUSE, REFUSE, REFUSE)
)
"""The rule for calls that bring tensors, complete.  It is what makes updates of clients without begin and end."""
