"""Random histories of requests, pauses and refreshes with faults: every token is explained by one committed version.

`make nightly` plays thousands more, of other seeds.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from msgspec import structs

from tests.faults.cells import STAGINGS
from tests.faults.injections import FAILURES
from tests.faults.wrong_engines import wrong_engines
from tests.history.actions import (
    DTYPES,
    Dtype,
    History,
    Pause,
    Refresh,
    Small,
    Steps,
    Submit,
    decode,
    encode,
    histories,
)
from tests.history.checker import Tally
from tests.history.machine import HistoryFailed, Zoo, play
from tests.history.transports import TRANSPORTS
from tests.tiers import examples, in_the_gate
from weight_sync.staging import StagingMode

NUM_HISTORIES = examples(400, gate=40)
NUM_TO_CATCH = 600  # histories within which a wrong variant must be noticed; most are within a hundred

WRONG_VARIANTS = wrong_engines("histories")

_quiet = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("history") / "model")


def test_every_token_of_random_histories_is_explained(zoo: Zoo) -> None:
    tally = Tally()

    @settings(_quiet, max_examples=NUM_HISTORIES)
    @given(histories(tuple(TRANSPORTS)))
    def many(history: History) -> None:
        tally.add(play(history, zoo))

    many()
    # Enough happened for the checks to mean something, and little was left open.
    assert tally.histories >= NUM_HISTORIES and tally.undecided < NUM_HISTORIES // 10
    if in_the_gate():
        assert tally.commits > 30 and tally.refusals > 15 and tally.tokens > 150
    else:
        assert tally.commits > 600 and tally.refusals > 300 and tally.poisonings > 10
        assert tally.tokens > 3000 and tally.on_mixed_kv > 150


@pytest.mark.mutant
@pytest.mark.parametrize("variant", WRONG_VARIANTS)
def test_wrong_variants_are_caught(zoo: Zoo, variant: str) -> None:
    @settings(_quiet, max_examples=NUM_TO_CATCH, phases=[Phase.generate])
    @given(histories(tuple(TRANSPORTS)))
    def many(history: History) -> None:
        play(history, zoo)

    with WRONG_VARIANTS[variant](), pytest.raises(HistoryFailed):
        many()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("pause", [None, "retract", "in_place"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_refresh_over_every_transport(zoo: Zoo, transport: str, pause: str | None, dtype: Dtype) -> None:
    """Random histories rely on this: without a fault each transport brings new weights in the midst of requests."""
    refresh = Refresh(transport, content=2, pause=pause, meanwhile=[Steps(2), Steps(2)])  # type: ignore[arg-type]
    history = History(
        [Submit([5, 6, 7, 8], new=24, stream=True, temperature=1.0), Steps(4), refresh, Steps(4)], pool=200
    )
    tally = play(decode(encode(history)), zoo)
    assert tally.commits == 2 and tally.refusals == 0 and tally.tokens == 28


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("failure", FAILURES)
def test_every_failure_is_injected(zoo: Zoo, failure: str, staging: StagingMode) -> None:
    """Random histories rely on this: in every staging mode the refresh is refused, and poisons where it must."""
    refresh = Refresh("distributed", content=1, fault=failure, pause="retract")  # type: ignore[arg-type]
    tally = play(History([Submit([1, 2, 3], new=8), refresh, Steps(3)], staging=staging), zoo)
    assert tally.refusals and tally.commits == 1  # of the refresh with which every history ends
    assert tally.poisonings == (failure == "restore" or staging == "in_place")


@pytest.mark.parametrize("turns", range(6))
def test_a_pause_amid_a_verb_that_loses_an_update_is_a_new_start(zoo: Zoo, turns: int) -> None:
    """The pause may come before the loss or after: ranks lose the update at different times."""
    refresh = Refresh("distributed", content=1, bracket=False, calls=1)
    meanwhile: list[Small] = [*[Steps(1)] * turns, Pause("abort")]
    lost = structs.replace(refresh, pause="abort", part=2, meanwhile=meanwhile)
    play(History([lost, refresh], pool=40), zoo)


def test_a_failure_shows_the_history_and_how_to_play_it_again(zoo: Zoo) -> None:
    history = History(
        [Submit([5, 6, 7], new=16), Steps(3), Pause("retract"), Refresh("distributed", content=1), Steps(1)], pool=200
    )
    with WRONG_VARIANTS["recomputes_routes_after_a_retraction"](), pytest.raises(HistoryFailed) as failure:
        play(history, zoo)
    text = str(failure.value)
    assert "row 0 of the routes" in text and '2 ["Pause","retract"]' in text
    assert decode(text.rpartition("replay '")[2].rstrip("'")) == history
