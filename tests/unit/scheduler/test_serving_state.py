"""The gates: the work that each stops, alone and together with others, and the reason that it gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from rollout.core.errors import Unavailable
from rollout.scheduler.serving_state import ServingState

Change = Callable[[ServingState], None]

# A verb that closes a gate, one that opens it, whether steps run meanwhile, and the reason of a refusal, if any.
GATES: dict[str, tuple[Change, Change | None, bool, str | None]] = {
    "pause": (ServingState.pause, ServingState.resume, False, None),
    "memory": (lambda s: s.withhold("memory is released"), lambda s: s.withhold(None), False, "memory is released"),
    "write": (lambda s: s.write(True), lambda s: s.write(False), False, None),
    "poison": (lambda s: s.poison("torn"), ServingState.heal, False, "the weights are poisoned: torn"),
    "drain": (ServingState.drain, None, True, "the server is shutting down"),
    "stop": (ServingState.stop, None, False, None),
}


def refusal(serving: ServingState) -> str | None:
    try:
        serving.require_admission()
    except Unavailable as error:
        return str(error)
    return None


@pytest.mark.parametrize("names", [c for n in range(4) for c in itertools.combinations(GATES, n)], ids="+".join)
def test_a_gate_stays_closed_until_it_is_opened_itself(names: tuple[str, ...]) -> None:
    serving = ServingState()
    for name in names:
        GATES[name][0](serving)
    closed = list(names)
    for name in (None, *names):
        opens = GATES[name][1] if name else None
        if opens is not None and name is not None:
            opens(serving)
            closed.remove(name)
        assert serving.may_step == all(GATES[one][2] for one in closed)
        reasons = [reason for one in closed if (reason := GATES[one][3])]
        found = refusal(serving)
        assert (found is None) == (not reasons)
        assert found is None or any(found.startswith(reason) for reason in reasons)


def test_a_pause_that_waits_lets_steps_run_but_none_begin() -> None:
    serving = ServingState()
    serving.pause_once_ended()
    assert serving.may_step and not serving.may_begin and serving.is_pausing and not serving.is_paused
    serving.pause()
    assert not serving.may_step and serving.is_paused and not serving.is_pausing
    serving.pause_once_ended()
    serving.resume()
    assert serving.may_step and serving.may_begin


def test_a_complete_refresh_heals_whatever_was_lost() -> None:
    serving = ServingState()
    serving.poison("torn")
    serving.lose_content()
    serving.regain_content()
    assert not serving.has_whole_weights
    serving.lose_content()
    serving.heal()
    assert serving.has_whole_weights and serving.poisoned is None
