"""Plays cells and judges the outcome of each.

fault -> the lease of a dead trainer expires -> which version serves?  -> a good refresh -> which version serves?
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollout.core.errors import FatalError
from tests.faults.cells import Cell
from tests.faults.contents import Version, Zoo
from tests.faults.engines import Engine, Outcome, Wrong
from tests.faults.trainers import Trainer
from tests.scheduler_harness import Result


@dataclass(frozen=True)
class Played:
    """`outcome` None: the cell is wrong, and `wrong` is the reason."""

    fault: str
    point: str
    transport: str
    staging: str
    outcome: Outcome | None
    wrong: str | None = None
    seconds: float = 0.0


def play_all(
    zoo: Zoo,
    scratch: Path,
    cells: Iterable[Cell],
    trainer_class: type[Trainer] = Trainer,
    engine_class: type[Engine] = Engine,
) -> Iterator[Played]:
    """Play cells of one transport and staging mode on one engine, and on a new one after a cell that is wrong."""
    engine: Engine | None = None
    trainer: Trainer | None = None
    for cell in cells:
        start = time.perf_counter()
        outcome, wrong = None, None
        try:
            if engine is None or trainer is None:
                folder = Path(tempfile.mkdtemp(dir=scratch))
                engine = engine_class(zoo, cell.staging, folder)
                trainer = trainer_class(engine, cell.transport)
                good_refresh(engine, trainer)
            outcome = play(engine, trainer, cell)
        except Wrong as error:
            wrong = str(error)
        except FatalError as error:
            if "ENDED" in cell.allowed:
                outcome = "ENDED"
            else:
                wrong = f"the engine ended: {error}"
        except Exception:
            wrong = f"the engine broke: {traceback.format_exc(limit=-4)}"
        if engine is not None:
            engine.clean_up()
        if wrong is not None or outcome == "ENDED":
            engine = None  # it may hang
        seconds = time.perf_counter() - start
        yield Played(cell.fault.title, cell.point, cell.transport, cell.staging, outcome, wrong, seconds)
    if engine is not None:
        engine.updater.close()


def play(engine: Engine, trainer: Trainer, cell: Cell) -> Outcome:
    """Play one cell, and return its outcome.  Raises `Wrong`."""
    old, new = engine.in_force, engine.next_version(1)
    trainer.fail(new, cell.sabotage)
    if trainer.is_dead:
        engine.lapse()
        engine.require_closed()
    engine.settle()
    request = trainer.request
    if request is not None:
        engine.finish(request)
    outcome = engine.outcome(old, new)
    if request is not None:
        _check_request(engine, cell, request, old, new, outcome)
    if outcome not in cell.allowed:
        raise Wrong(f"{outcome} serves, and not {' or '.join(sorted(cell.allowed))}")
    engine.in_force = new if outcome == "new" else old
    if outcome == "POISONED" and cell.transport == "delta":
        good_refresh(engine, Trainer(engine, "flattened"))  # weights that are not a version have no delta
    good_refresh(engine, trainer, 1 if outcome == "new" else 2)
    return outcome


def good_refresh(engine: Engine, trainer: Trainer, offset: int = 1) -> None:
    """Refresh to the content `offset` further.  Raises `Wrong` unless it comes into force."""
    good = engine.next_version(offset)
    trainer.refresh(good)
    engine.outcome(good, good)
    engine.in_force = good


def _check_request(engine: Engine, cell: Cell, request: Result, old: Version, new: Version, outcome: Outcome) -> None:
    """Check that the request that ran during the fault is of one version, or was rightly aborted or refused."""
    record = request.finished
    assert record is not None
    if record.reason.status_code == 503 and outcome == "POISONED":
        return
    if record.reason.type == "abort" and cell.fault.aborts:
        return
    engine.require_answer(request, engine.version_of(request, old, new))
