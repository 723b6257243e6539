"""A part of the fault matrix that has every fault, transport and staging mode in it; `make fault-matrix` plays all."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.faults import killed, ranks, stopped, stopped_pairs
from tests.faults.cells import FAULTS, STAGINGS, Cell, cells
from tests.faults.contents import Zoo
from tests.faults.matrix import play_all
from tests.faults.report import table
from tests.faults.trainers import TRANSPORTS
from tests.faults.wrong_engines import wrong_engines
from weight_sync.staging import StagingMode

WRONG_ENGINES = wrong_engines("matrix")
STRIDE = 7  # of cells that differ in transport and staging mode only, one of this many


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    torch.set_num_threads(1)
    return Zoo(tmp_path_factory.mktemp("faults"))


def part_of_the_matrix() -> list[Cell]:
    """Choose cells with every fault at every point; transports and staging modes take turns."""
    alike: dict[tuple[str, str], list[Cell]] = {}
    for transport, staging in itertools.product(TRANSPORTS, STAGINGS):
        for cell in cells(staging, transport):
            alike.setdefault((cell.fault.title, cell.point), []).append(cell)
    groups = list(alike.values())
    return [cell for turn, group in enumerate(groups) for cell in group[turn % min(STRIDE, len(group)) :: STRIDE]]


def test_the_part_has_all_faults_transports_and_staging_modes() -> None:
    part = part_of_the_matrix()
    assert {cell.fault.title for cell in part} == {fault.title for fault in FAULTS}
    assert {(cell.transport, cell.staging) for cell in part} == set(itertools.product(TRANSPORTS, STAGINGS))


@pytest.mark.full(
    but=(
        "distributed-host",
        "flattened-in_place",
        "tensor safetensors-journal",
        "ipc-device",
        "delta-in_place",
        "disk-host",
        "tensor pickle-host",
        "pull_weights-in_place",
    )
)
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_chosen_fault_ends_as_it_must(zoo: Zoo, tmp_path: Path, transport: str, staging: StagingMode) -> None:
    chosen = [cell for cell in part_of_the_matrix() if (cell.transport, cell.staging) == (transport, staging)]
    played = list(play_all(zoo, tmp_path, chosen))
    assert played
    assert not [cell for cell in played if cell.wrong is not None]


@pytest.mark.full(but=("flattened", "memory", "ipc"))
@pytest.mark.parametrize("transport", killed.TRANSPORTS)
def test_trainers_that_are_killed(zoo: Zoo, tmp_path: Path, transport: str) -> None:
    chosen = list(killed.cells("host", transport))[1::2]
    played = list(play_all(zoo, tmp_path, chosen, killed.ProcessTrainer))
    assert len(played) == 2
    assert not [cell for cell in played if cell.wrong is not None]


@pytest.mark.parametrize("how", ["raises", "killed"])
@pytest.mark.parametrize("step", ["middle", "commit"])
def test_ranks_that_raise_or_are_killed(how: str, step: str) -> None:
    (cell,) = [cell for cell in ranks.cells("host", 2) if (cell.how, cell.step) == (how, step)]
    played = ranks.play(cell)
    assert played.wrong is None and played.outcome == "old"


STOPPED = {
    "2 ranks": [("commit", "vote", "stops for a moment"), ("commit", "vote", "dies")],
    "3 replicas": [("commit", "vote", "stops for long")],
}


@pytest.mark.full(but="2 ranks")
@pytest.mark.parametrize("layout", STOPPED)
def test_ranks_that_stop_or_die(zoo: Zoo, layout: str) -> None:
    chosen = STOPPED[layout]
    played = list(stopped.play_all(zoo, layout, lambda cell: (cell.verb, cell.point, cell.how) in chosen))
    assert [cell.wrong for cell in played] == [None] * len(chosen)


@pytest.mark.full
def test_ranks_that_stop_or_die_while_a_model_and_an_adapter_are_committed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    chosen = {("planned", "dies"), ("written", "stops for a moment")}
    played = list(
        stopped.play_all(
            stopped_pairs.PairZoo(tmp_path),
            "2 ranks",
            lambda cell: (cell.point, cell.how) in chosen,
            player_type=stopped_pairs.PairPlayer,
        )
    )
    assert [(cell.outcome, cell.wrong) for cell in played] == [("ENDED", None), ("new", None)]


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("wrong", "verb", "point"),
    [("a_vote_that_raises_is_a_no", "commit", "vote"), ("serves_on_after_a_lost_exchange", "bucket", "exchange")],
)
def test_wrong_ranks_are_found(zoo: Zoo, wrong: str, verb: str, point: str) -> None:
    chosen = (verb, point, "stops for long")
    cells = stopped.play_all(zoo, "3 replicas", lambda cell: (cell.verb, cell.point, cell.how) == chosen, wrong)
    assert [cell.wrong is not None for cell in cells] == [True]


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", WRONG_ENGINES)
def test_wrong_engines_are_found(zoo: Zoo, tmp_path: Path, wrong: str) -> None:
    titles = {
        "sender killed", "byte flipped", "repeated", "vote lost", "restoring fails too", "flush of the cache",
        "two trainers: the second sends",
    }  # fmt: skip
    with WRONG_ENGINES[wrong]():
        chosen = [cell for cell in cells("host", "flattened") if cell.fault.title in titles]
        assert any(cell.wrong is not None for cell in play_all(zoo, tmp_path, chosen))


def test_the_table_shows_what_is_wrong_and_what_cannot_occur(zoo: Zoo, tmp_path: Path) -> None:
    chosen = [cell for cell in cells("host", "flattened") if cell.fault.title == "byte flipped"]
    with WRONG_ENGINES["compares_no_fingerprints"]():
        played = list(play_all(zoo, tmp_path, chosen))
    only = [cell for cell in cells("in_place", "pull_weights") if cell.fault.title == "disk full"]
    grid = table([*played, *play_all(zoo, tmp_path, only)], "title")
    columns = {column.header: list(column.cells) for column in grid.columns}
    assert columns["flattened"][0] == "WRONG" and columns["flattened"][-1] == "-"
    assert columns["pull\nweights"][0] == "-" and columns["pull\nweights"][-1] == "old"
