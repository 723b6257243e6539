"""`EngineError`: what engines did not do, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weight_sync.errors import WeightSyncError


class EngineError(WeightSyncError):
    """Engines failed a refresh, or a rendezvous.  `failures`: what each of them said, or how it fell silent.

    `committed`: engines that have the new version all the same, as the failure came after their commit.  `unknown`:
    engines that did not answer whether they do; `weight_update(update_id)` asks them again.
    """

    status_code = 502

    def __init__(
        self,
        failures: Mapping[str, BaseException],
        committed: Sequence[str] = (),
        unknown: Sequence[str] = (),
        update_id: str | None = None,
    ) -> None:
        said = [f"engine {name}: {type(error).__name__}: {error}" for name, error in failures.items()]
        if committed:
            said.append(f"committed all the same: {', '.join(committed)}")
        if unknown:
            said.append(f"not known whether committed: {', '.join(unknown)} (update {update_id})")
        super().__init__("; ".join(said))
        self.failures = dict(failures)
        self.committed = list(committed)
        self.unknown = list(unknown)
        self.update_id = update_id
