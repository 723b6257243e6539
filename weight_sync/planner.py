"""`Planner`: the plans of what one sender sends in each refresh, kept from one to the next."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace

from weight_sync.bucket_layout import BucketLayout, KnownCalls
from weight_sync.content import TensorTable
from weight_sync.fp8_wire import value_metas
from weight_sync.held_format import HeldFormats
from weight_sync.manifest import Manifest, ManifestPlan, plan_manifest
from weight_sync.plan import BucketPlan, Homes, plan_bucket
from weight_sync.rank_cover import RankCover
from weight_sync.splitting import split_wire
from weight_sync.tensor_meta import LogicalWeights

_MANIFESTS_KEPT = 2
"""Plans of manifests are kept for this many times the tensors of the model, all together."""


class Planner:
    """Makes plans, and keeps them as long as their layouts are kept and the places stay.

    `quantised`: see `Intake`.
    """

    def __init__(self, table: TensorTable, quantised: HeldFormats) -> None:
        self.table = table
        self._quantised = quantised
        self._manifests: KnownCalls[ManifestPlan] = KnownCalls(_MANIFESTS_KEPT * len(table))
        self._homes: tuple[Hashable, Homes] | None = None
        self._plans: weakref.WeakKeyDictionary[BucketLayout, dict[Hashable, BucketPlan]] = weakref.WeakKeyDictionary()

    def manifest(self, weights: LogicalWeights, manifest: Manifest, cast: bool) -> ManifestPlan:
        """Return the plan of a manifest.  Raises as `plan_manifest`."""
        if manifest.key is None:
            return plan_manifest(weights, self.table, manifest, cast)
        key = (manifest.key, cast)
        return self._manifests.get(key, lambda: plan_manifest(weights, self.table, manifest, cast))

    def homes(self, weights: LogicalWeights) -> Homes:
        """Return where tensors live now; plans for places that were left are forgotten."""
        key = weights.places_key()
        if self._homes is None or self._homes[0] != key:
            self._homes = key, Homes(weights)
            self._plans.clear()
        return self._homes[1]

    def plans(
        self, weights: LogicalWeights, layouts: Sequence[BucketLayout], cast: bool, cover: RankCover | None = None
    ) -> list[BucketPlan]:
        """Return the plan of each layout of a call.  `cover`: of an update per rank.

        Raises as `value_metas` and `split_wire`, of all tensors of the call together, and as `RankCover.kept_boxes`.
        """
        homes, key = self.homes(weights), (cast, cover)
        known = [self._plans.get(layout, {}).get(key) for layout in layouts]
        if all(plan is not None for plan in known):
            return [plan for plan in known if plan is not None]
        values = value_metas(weights, [meta for layout in layouts for meta in layout.metas])
        pieces = dict(zip(values, split_wire(weights, values, cast), strict=True))
        made = [plan_bucket(layout, pieces, homes, self.table, self._quantised) for layout in layouts]
        if cover is not None:
            made = [plan if plan.boxes is None else replace(plan, boxes=cover.kept_boxes(plan.boxes)) for plan in made]
        for layout, plan in zip(layouts, made, strict=True):
            self._plans.setdefault(layout, {})[key] = plan
        return made
