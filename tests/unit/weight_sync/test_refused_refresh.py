"""A refused refresh changes nothing: one table of layer, transport, fault and layout, and one assertion for all rows.

The rows and what is compared before and after stand in `tests/refusals`.  Bug numbers are in the ids of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.core.errors import LockstepError
from tests.parallel_harness import ParallelHarness  # noqa: F401
from tests.refusals.engines import engine_rows, rank_rows
from tests.refusals.row import Row
from tests.refusals.updaters import manifest_rows, memory_rows, source_rows
from tests.refusals.wrong_engines import NOTICED, Context
from weight_sync.errors import WeightSyncError

ROWS = {row.id: row for rows in (manifest_rows, memory_rows, source_rows, engine_rows, rank_rows) for row in rows()}


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id, marks=row.marks) for row in ROWS.values()])
def test_a_refused_refresh_changes_nothing(row: Row, tmp_path: Path) -> None:
    row.play(tmp_path)


@pytest.mark.mutant
@pytest.mark.parametrize(("wrong", "row"), NOTICED, ids=[f"{wrong.__name__}-{row}" for wrong, row in NOTICED])
def test_a_wrong_engine_is_noticed(wrong: Callable[[], Context], row: str, tmp_path: Path) -> None:
    with wrong(), pytest.raises((AssertionError, LockstepError, WeightSyncError)):
        ROWS[row].play(tmp_path)
