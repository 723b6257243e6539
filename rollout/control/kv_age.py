"""The age that KV may reach under refreshes: `max_kv_version_lag`, and `abort_below_weight_version`.

Age counts commits, whatever the labels: KV that was written under weight epoch 3 is 2 behind in epoch 5.  KV in the
prefix cache is never behind: its namespaces end with their epoch.
"""

from __future__ import annotations

from rollout.core.errors import BadRequest
from rollout.model.model_state import ModelState
from rollout.scheduler.req import Req
from rollout.scheduler.scheduler import Scheduler

NO_LIMIT = -1


class KVAgeLimit:
    """Between a commit and the next step, retracts the requests whose KV is further behind than they allow.

    As in every retraction, their tokens, log-probabilities and routes stay, and their KV is computed again under the
    weights in force.  `default_lag` is the lag of requests that name none; `NO_LIMIT` allows any age.
    """

    def __init__(self, scheduler: Scheduler, default_lag: int) -> None:
        self._scheduler = scheduler
        self._default_lag = default_lag

    def advance(self) -> None:
        """Retract the requests whose KV a commit made too old.  Nothing ages between two commits."""
        epoch = self._scheduler.runner.state.epoch.weight_epoch
        too_old = [req for req in self._scheduler.queues.holding_kv() if self._is_too_old(req, epoch)]
        if too_old:
            self._scheduler.retract(too_old)

    def _is_too_old(self, req: Req, weight_epoch: int) -> bool:
        lag = self._default_lag if req.source.max_kv_version_lag is None else req.source.max_kv_version_lag
        if lag == NO_LIMIT:
            return False
        oldest = self._scheduler.records.oldest_epoch_held(req)
        return oldest is not None and weight_epoch - oldest > lag


def require_known_version(state: ModelState, weight_version: str | None, coming: str | None) -> None:
    """Raise `BadRequest` unless the label was or is in force, or is about to be (`coming`)."""
    if weight_version is None or weight_version == coming or state.epoch_of(weight_version) is not None:
        return
    raise BadRequest(f"abort_below_weight_version: {weight_version!r} was never in force here")


def abort_below(scheduler: Scheduler, weight_version: str | None) -> int:
    """End the requests that have a token or KV of an older epoch than the last one labelled `weight_version`.

    They keep their output, and their finish reason names the cause.  Returns the number of ended requests.
    """
    if weight_version is None:
        return 0
    state, records = scheduler.runner.state, scheduler.records
    limit = state.epoch_of(weight_version)
    assert limit is not None, "checked by require_known_version"
    began: dict[str, list[str]] = {}
    for req in scheduler.queues.all():
        oldest = records.oldest_epoch_used(req)
        if oldest is not None and oldest < limit:
            began.setdefault(state.version_of(oldest), []).append(req.rid)
    aborted = 0
    for version, rids in began.items():
        reason = f"Aborted: it began under weight version {version!r}, which is older than {weight_version!r}"
        aborted += scheduler.abort(rids, reason=reason)
    return aborted
