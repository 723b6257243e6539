"""What is told of a weight update: the open one, the one that came into force, and the last that failed.

Knows transactions and leases.  Does not know endpoints.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weight_sync.lease import Lease
from weight_sync.staging import StagingMode
from weight_sync.transaction import WeightTransaction

NAMES_SHOWN = 10
_OF_THE_OPEN_ONE = (
    *("update_id", "state", "weight_version", "coverage", "received", "missing", "received_names", "missing_names"),
    *("num_bytes", "lease_s", "lease_left_s", "failed"),
)


@dataclass(frozen=True)
class CommitResult:
    """What one commit put into force."""

    weight_version: str | None  # None: the sender named none
    names: list[str]  # logical tensors written
    num_bytes: int
    seconds: float  # time that the step thread spent
    content_digest: str | None = None  # of the whole content now, as far as it is known
    update_id: str | None = None


@dataclass(frozen=True)
class UpdateFailure:
    """Why a weight update did not come into force.  `time`: seconds since 1970."""

    reason: str
    weight_version: str | None
    time: float


def update_status(
    transaction: WeightTransaction | None,
    lease: Lease | None,
    *,
    update_id: str | None,
    bound: bool,
    implicit: bool,
    staging: StagingMode,
    last_failure: UpdateFailure | None,
) -> dict[str, Any]:
    """`open`, `implicit`, `bound`, `update_id`, `state`, `weight_version`, `coverage`, `received` and `missing`
    (counts, and the first names as `received_names` and `missing_names`), `num_bytes` (received), `lease_s`,
    `lease_left_s`, `failed` (reason), `staging`, `last_failure`.  With nothing open all but the first three and the
    last two are None.
    """
    data: dict[str, Any] = dict.fromkeys(_OF_THE_OPEN_ONE)
    if transaction is not None and lease is not None:
        received, missing = transaction.received, transaction.missing
        data = {
            "update_id": update_id,
            "state": transaction.state.value,
            "weight_version": transaction.weight_version,
            "coverage": transaction.coverage,
            "received": len(received),
            "missing": len(missing),
            "received_names": received[:NAMES_SHOWN],
            "missing_names": missing[:NAMES_SHOWN],
            "num_bytes": transaction.num_bytes,
            "lease_s": lease.seconds,
            "lease_left_s": lease.left_s,
            "failed": transaction.failure,
        }
    return {
        "open": transaction is not None,
        "implicit": transaction is not None and implicit,
        "bound": transaction is not None and bound,
        **data,
        "staging": staging,
        "last_failure": None if last_failure is None else asdict(last_failure),
    }
