"""Ranks that stop and go on (SIGSTOP, SIGCONT) and ranks that die (SIGKILL), at each point of each weight verb.

Each rank is a worker process of a server, with shortened deadlines; this process is the server's main process.  At
the point for which it is armed, a rank stops itself or kills itself.  A stopped rank goes on before the deadline of the
others or after it.  Then there are two right outcomes.  Either all ranks serve one version, which agrees with the
answer to the verb, and take a good refresh.  Or the engine has ended with a reason.  Nothing takes longer than
`live_ranks.LIMIT_S`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from safetensors.torch import save

from rollout.core.args.server_args import ServerArgs
from rollout.core.messages.io_struct import ContinueGenerationReqInput, ControlReqOutput, PauseGenerationReqInput
from rollout.core.messages.message import ControlReqInput
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from rollout.distributed.layout import layout_of
from tests.faults.contents import Version, Zoo
from tests.faults.engines import Outcome, Wrong
from tests.faults.live_ranks import HOWS, LAYOUTS, Ended, How, LiveRanks
from tests.faults.matrix import Played

_POINTS: dict[str, tuple[str, ...]] = {
    "begin": ("exchange",),
    "bucket": ("taken", "at work", "exchange", "exchanged"),
    "verify": ("exchange", "exchanged"),
    "commit": ("taken", "exchanged", "vote", "voted", "published", "answered"),
    "continue": ("exchange", "vote", "voted"),
    "abort": ("exchange",),
    "relabel": ("exchange", "answered"),
}


@dataclass(frozen=True)
class StopCell:
    """The rank `victim`, counted from 0, stops or dies at a point of a verb."""

    layout: str
    verb: str
    point: str
    how: How
    victim: int

    @property
    def title(self) -> str:
        return f"{self.verb}: a rank {self.how}"

    def __str__(self) -> str:
        return f"rank {self.victim} of {self.layout} {self.how} | {self.verb}: {self.point}"


def cells(layout: str, points: Mapping[str, Sequence[str]]) -> Iterator[StopCell]:
    """Yield a cell for every point, by verb, and way to stop; the ranks are the victim by turns."""
    ranks = layout_of(ServerArgs(model_path="", **LAYOUTS[layout])).world_size
    for turn, (verb, point) in enumerate((verb, point) for verb, of_verb in points.items() for point in of_verb):
        for number, how in enumerate(HOWS):
            yield StopCell(layout, verb, point, how, (turn + number) % ranks)


class Player:
    """Plays the cells of one layout, on one server as long as it lives.

    The expected answers come from a server of this layout without a fault.
    """

    points: ClassVar[Mapping[str, Sequence[str]]] = _POINTS

    def __init__(self, zoo: Zoo, layout: str, wrong: str | None = None) -> None:
        self._zoo, self._layout, self._wrong = zoo, layout, wrong
        self._ranks: LiveRanks | None = None
        self._numbers = itertools.count(1)
        self._expected: dict[int, Any] = {}
        ranks = self._server()
        for content in (0, 1):
            if content:
                self._refresh(ranks, Version("v1", content))
            self._expected[content] = [answers[1:] for answers in ranks.ask()]
        assert self._expected[0] != self._expected[1]

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def play(self, cell: StopCell) -> Played:
        start = time.perf_counter()
        outcome, wrong = None, None
        try:
            outcome = self._play(cell)
        except Wrong as error:
            wrong = f"rank {cell.victim}: {error}"
        if outcome in (None, "ENDED"):
            self.close()
        seconds = time.perf_counter() - start
        return Played(cell.title, cell.point, cell.layout, "host", outcome, wrong, seconds)

    def _server(self) -> LiveRanks:
        if self._ranks is None:
            self._ranks = LiveRanks(self._zoo, self._layout, self._wrong)
        return self._ranks

    def _play(self, cell: StopCell) -> Outcome:
        ranks = self._server()
        old = ranks.in_force
        new = Version(f"n{next(self._numbers)}", 1 - old.content)
        try:
            answer = self._fault(ranks, cell, new)
            outcome = self._outcome(ranks, old, new)
            if cell.verb in ("commit", "continue", "relabel") and answer.success != (outcome == "new"):
                raise Wrong(f"{outcome} serves, and the answer was: {answer.message or answer.success}")
            with suppress(Wrong):
                ranks.good(AbortWeightUpdateReqInput)
            self._refresh(ranks, Version(f"g{next(self._numbers)}", 1 - ranks.in_force.content))
            self._outcome(ranks, ranks.in_force, ranks.in_force)
        except Ended as error:
            if cell.how == "stops for a moment":
                raise Wrong(f"a moment ended the engine: {error}") from None
            return "ENDED"
        return outcome

    def _fault(self, ranks: LiveRanks, cell: StopCell, new: Version) -> ControlReqOutput:
        """Prepare and post the verb, let the victim stop or die in it, and return the answer."""
        verb, fields = self._lead_up(ranks, cell.verb, new)
        ranks.arm(cell.victim, cell.point, cell.how)
        request_id = ranks.post(verb, **fields)
        if cell.how != "dies":
            ranks.go_on_when_stopped(cell.victim, cell.how)
        return ranks.answer(request_id)

    def _lead_up(self, ranks: LiveRanks, verb: str, new: Version) -> tuple[type[ControlReqInput], dict[str, Any]]:
        bucket = {"payload": self._payload(new), "format": "safetensors"}
        if verb == "relabel":
            return UpdateWeightVersionReqInput, {"new_version": new.label}
        if verb == "continue":
            ranks.good(PauseGenerationReqInput, mode="in_place")
            ranks.good(UpdateWeightsFromTensorReqInput, **bucket, weight_version=new.label)
            return ContinueGenerationReqInput, {}
        if verb == "begin":
            return BeginWeightUpdateReqInput, self._stated(new)
        ranks.good(BeginWeightUpdateReqInput, **self._stated(new))
        if verb == "bucket":
            return UpdateWeightsFromTensorReqInput, bucket
        ranks.good(UpdateWeightsFromTensorReqInput, **bucket)
        if verb == "abort":
            return AbortWeightUpdateReqInput, {}
        if verb == "commit":
            ranks.good(EndWeightUpdateReqInput, phase="verify")
        return EndWeightUpdateReqInput, {"phase": verb}

    def _outcome(self, ranks: LiveRanks, old: Version, new: Version) -> Outcome:
        """Return which of the two all ranks serve, by label and by content.  Raises `Wrong` for anything else."""
        answers = ranks.ask()
        for outcome, label, contents in (("old", old.label, {old.content}), ("new", new.label, {0, 1})):
            for content in contents:
                if answers == [(label, *words) for words in self._expected[content]]:
                    ranks.in_force = Version(label, content)
                    return outcome  # type: ignore[return-value]
        raise Wrong(f"neither {old} nor {new} serves on all ranks, but labels {[label for label, _, _ in answers]}")

    def _refresh(self, ranks: LiveRanks, version: Version) -> None:
        ranks.good(BeginWeightUpdateReqInput, **self._stated(version))
        ranks.good(UpdateWeightsFromTensorReqInput, payload=self._payload(version), format="safetensors")
        ranks.good(EndWeightUpdateReqInput)
        ranks.in_force = version

    def _stated(self, version: Version) -> dict[str, Any]:
        """Return the fields of a begin."""
        return {"weight_version": version.label}

    def _payload(self, version: Version) -> bytearray:
        return bytearray(save(self._zoo.contents[version.content]))


def play_all(
    zoo: Zoo,
    layout: str,
    chosen: Callable[[StopCell], bool],
    wrong: str | None = None,
    player_type: type[Player] = Player,
) -> Iterator[Played]:
    """Play the chosen cells of a layout.  `wrong` names the rule that its ranks break, if any."""
    player = player_type(zoo, layout, wrong)
    try:
        yield from (player.play(cell) for cell in cells(layout, player.points) if chosen(cell))
    finally:
        player.close()
