"""`EngineError`: what engines did not do, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weight_sync.errors import WeightSyncError


class EngineError(WeightSyncError):
    """Engines failed a refresh, or a rendezvous.  `failures`: what each of them said, or how it fell silent.

    `committed`: engines that have the new version all the same, as the failure came after their commit.
    """

    status_code = 502

    def __init__(self, failures: Mapping[str, BaseException], committed: Sequence[str] = ()) -> None:
        said = "; ".join(f"engine {name}: {type(error).__name__}: {error}" for name, error in failures.items())
        super().__init__(f"{said}; committed all the same: {', '.join(committed)}" if committed else said)
        self.failures = dict(failures)
        self.committed = list(committed)
