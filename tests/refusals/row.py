"""A row of the table of refusals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.refusals.targets import (
    Refusal,
    require_unchanged,
)

Fault = Callable[[Any, Path], Refusal]
Start = Callable[[Path], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Row:
    """`start` makes the target; `fault` refreshes it, and must be refused with `kind` and `reason`."""

    id: str
    start: Start
    fault: Fault
    kind: type[Exception] | tuple[int, ...]
    reason: str
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def play(self, scratch: Path) -> None:
        with self.start(scratch) as target:
            require_unchanged(target, lambda: self.fault(target, scratch), self.kind, self.reason)
