"""A timer of torch operators, with what each one had to move and to compute.

While it is switched on, Python runs around every operator, also where a tape plays the forward.  The operator then
finds the caches emptier: a small one takes several microseconds more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.profile.costs import operator_cost
from benchmarks.profile.machine import Machine


@dataclass(slots=True)
class OperatorUse:
    """Sums over calls of one operator.  `least_seconds` is the machine's roofline for the same calls."""

    calls: float = 0.0
    seconds: float = 0.0
    least_seconds: float = 0.0
    bytes_moved: float = 0.0
    flops: float = 0.0

    def add(self, other: OperatorUse) -> None:
        self.calls += other.calls
        self.seconds += other.seconds
        self.least_seconds += other.least_seconds
        self.bytes_moved += other.bytes_moved
        self.flops += other.flops


class OperatorTimer(TorchDispatchMode):
    """A context: operators that this thread runs inside it are timed, composite ones of ours by their parts."""

    def __init__(self, machine: Machine, clock: Callable[[], float] = perf_counter) -> None:
        super().__init__()
        self.machine = machine  # calls are held against it from now on
        self._clock = clock
        self._uses: dict[str, OperatorUse] = defaultdict(OperatorUse)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "lockstep" and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        start = self._clock()
        result = func(*args, **kwargs)
        seconds = self._clock() - start
        cost = operator_cost(func, args, kwargs, result)
        use = self._uses[operator_name(func)]
        use.calls += 1
        use.seconds += seconds
        use.least_seconds += self.machine.least_seconds(cost.bytes_moved, cost.flops, cost.dtype)
        use.bytes_moved += cost.bytes_moved
        use.flops += cost.flops
        return result

    def take(self) -> dict[str, OperatorUse]:
        """Return what was timed since the last call, by operator name."""
        uses, self._uses = self._uses, defaultdict(OperatorUse)
        return dict(uses)

    def put_back(self, uses: dict[str, OperatorUse]) -> None:
        """Put uses back, as if they had not been taken."""
        for name, use in uses.items():
            self._uses[name].add(use)


def operator_name(func: Any) -> str:
    """Return `linear` for the engine's `lockstep::linear`, `aten.mm` for torch's; overloads share one name."""
    namespace, name = func._schema.name.split("::")
    return name if namespace == "lockstep" else f"{namespace}.{name}"
