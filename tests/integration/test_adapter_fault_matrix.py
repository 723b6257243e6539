"""A part of the fault matrix whose target is an adapter; `make fault-matrix` plays all of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.faults.adapters import LEFT_OUT, TRANSPORTS, AdapterCell, AdapterEngine, AdapterTrainer, AdapterZoo, cells
from tests.faults.cells import FAULTS, STAGINGS
from tests.faults.matrix import Played, play_all
from tests.faults.trainers import PULL
from tests.faults.wrong_engines import wrong_engines

WRONG_ENGINES = wrong_engines("adapters")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> AdapterZoo:
    torch.set_num_threads(1)
    return AdapterZoo(tmp_path_factory.mktemp("faults"))


def play(zoo: AdapterZoo, scratch: Path, chosen: list[AdapterCell]) -> list[Played]:
    by_staging = itertools.groupby(chosen, lambda cell: cell.staging)
    return [
        played
        for _, of_one in by_staging
        for played in play_all(zoo, scratch, list(of_one), AdapterTrainer, AdapterEngine)
    ]


def part_of_the_matrix() -> list[AdapterCell]:
    """Choose one cell for every fault at every point; transports and staging modes take turns."""
    alike: dict[tuple[str, str], list[AdapterCell]] = {}
    for transport, staging in itertools.product(TRANSPORTS, STAGINGS):
        for cell in cells(staging, transport):
            alike.setdefault((cell.fault.title, cell.point), []).append(cell)
    return [group[11 * turn % len(group)] for turn, group in enumerate(alike.values())]


def test_the_part_has_all_faults_transports_and_staging_modes() -> None:
    part = part_of_the_matrix()
    of_pulls = {fault.title for fault in FAULTS if fault.transports == (PULL,)}
    assert {cell.fault.title for cell in part} == {fault.title for fault in FAULTS} - LEFT_OUT - of_pulls
    assert {cell.transport for cell in part} == set(TRANSPORTS) and {cell.staging for cell in part} == set(STAGINGS)


@pytest.mark.full(but="tensor safetensors")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_chosen_fault_ends_as_it_must(zoo: AdapterZoo, tmp_path: Path, transport: str) -> None:
    chosen = [cell for cell in part_of_the_matrix() if cell.transport == transport]
    played = play(zoo, tmp_path, sorted(chosen, key=lambda cell: cell.staging))
    assert len(played) == len(chosen) > 0
    assert not [cell for cell in played if cell.wrong is not None]


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", WRONG_ENGINES)
def test_wrong_engines_are_found(zoo: AdapterZoo, tmp_path: Path, wrong: str) -> None:
    titles = {"byte flipped", "flush of the cache"}
    with WRONG_ENGINES[wrong]():
        chosen = [cell for cell in cells("host", "flattened") if cell.fault.title in titles]
        assert any(cell.wrong is not None for cell in play(zoo, tmp_path, chosen))
