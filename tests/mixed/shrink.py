"""Makes a smaller schedule that fails all the same."""

from __future__ import annotations

import msgspec

from tests.mixed.play import MixedFailed, play
from tests.mixed.schedule import AnyAction, Schedule, Submit
from tests.mixed.zoo import Zoo


def shrink(failure: MixedFailed, zoo: Zoo) -> MixedFailed:
    """Leave out actions, then samples, as long as something fails; the failure may change on the way."""
    size = len(failure.schedule.actions)
    while size:
        smaller = _without_any(failure, size, zoo)
        size = size // 2 if smaller is None else min(size, len(smaller.schedule.actions))
        failure = smaller or failure
    return _with_fewer_samples(failure, zoo)


def _without_any(failure: MixedFailed, size: int, zoo: Zoo) -> MixedFailed | None:
    """Return a failure without `size` actions in a row, the last ones that can go."""
    actions = failure.schedule.actions
    for start in range(len(actions) - size, -1, -size):
        smaller = _fails(failure.schedule, [*actions[:start], *actions[start + size :]], zoo)
        if smaller is not None:
            return smaller
    return None


def _with_fewer_samples(failure: MixedFailed, zoo: Zoo) -> MixedFailed:
    for number, action in enumerate(failure.schedule.actions):
        if isinstance(action, Submit) and len(action.ask.seeds) > 1:
            ask = msgspec.structs.replace(action.ask, seeds=action.ask.seeds[:1])
            actions = [*failure.schedule.actions]
            actions[number] = Submit(ask)
            failure = _fails(failure.schedule, actions, zoo) or failure
    return failure


def _fails(schedule: Schedule, actions: list[AnyAction], zoo: Zoo) -> MixedFailed | None:
    try:
        play(msgspec.structs.replace(schedule, actions=actions), zoo)
    except MixedFailed as failure:
        return failure
    return None
