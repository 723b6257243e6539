"""`RefreshPlan`: everything of a refresh that is the same each time; `KeptPlans` finds it again.

A trainer sends the same names, shapes and buckets a thousand times.  A plan holds no tensor: it is found by the form of
what is given, and reads the tensors that are given.  So it can neither send memory that was the model's before, nor
keep that memory.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from weight_sync.bucket import plan_buckets
from weight_sync.rank_boxes import RankBoxes
from weight_sync.sender.gather import Gatherer
from weight_sync.sender.layout import Layout
from weight_sync.sender.lists import Contents
from weight_sync.sender.plan import TensorPlan, plan_tensors
from weight_sync.sender.rank_plan import RankPlan
from weight_sync.sender.ranks import TrainerRanks
from weight_sync.sender.source import Source, SourceForm
from weight_sync.sender.statement import RefreshStatement

_MAX_PLANS = 3


@dataclass(frozen=True)
class Settings:
    """The rest that a plan follows from: arguments of a refresh, where buckets are made, and who the ranks are."""

    dtype: torch.dtype | None
    split_experts: bool
    bucket_bytes: int
    device: torch.device
    ranks: Hashable


class RefreshPlan:
    """A plan for a source.  Raises `WeightRequestError` for one that cannot be sent."""

    def __init__(self, source: Source, settings: Settings, ranks: TrainerRanks | None) -> None:
        self._kept, self._settings = source.kept(), settings
        self._rank_plans: list[RankPlan] = []
        tensors = self._tensors(source)
        metas = tensors.metas
        buckets = plan_buckets(metas, settings.bucket_bytes)
        self.layout = Layout(tensors, buckets, ranks, settings.device)
        self.contents = Contents(metas)
        self._sent_as = {part.source: part.meta.dtype for part in tensors.parts.values()} if ranks is not None else {}
        self.tensors_digest = b"" if ranks is None else self.statement(source, {}, ranks).tensors_digest()

    def gatherer(self, source: Source, ranks: TrainerRanks | None, layout: Layout | None = None) -> Gatherer:
        """Return who gathers the tensors of `source`, which is of the form that this plan was made for.

        `layout`: of a `RankPlan` from here; None: its own.
        """
        return Gatherer(layout or self.layout, _picked(source.locals, self._kept), ranks)

    def for_ranks(self, boxes: RankBoxes, source: Source, ranks: TrainerRanks | None) -> RankPlan:
        """Return the plan to send these parts of the tensors to an engine's ranks.  Raises as `RankPlan`."""
        known = next((plan for plan in self._rank_plans if plan.boxes == boxes), None)
        if known is None:
            settings = self._settings
            known = RankPlan(self._tensors(source), boxes, settings.bucket_bytes, settings.device, ranks)
            self._rank_plans = [*self._rank_plans[1 - _MAX_PLANS :], known]
        return known

    def _tensors(self, source: Source) -> TensorPlan:
        return plan_tensors(source.named(self._kept), self._settings.dtype, self._settings.split_experts)

    def statement(self, source: Source, options: dict[str, object], ranks: TrainerRanks) -> RefreshStatement:
        """Return what must be equal on all ranks."""
        return RefreshStatement.of(source.named(self._kept), self._sent_as, options, ranks.meshes)


class KeptPlans:
    """The last few plans, by the form of their source and their settings."""

    def __init__(self) -> None:
        self._plans: list[tuple[Settings, SourceForm, RefreshPlan]] = []  # the one used last comes last

    def find(self, source: Source, settings: Settings, ranks: TrainerRanks | None) -> RefreshPlan:
        """Return the plan for a source; a new one unless there is one for the same form and settings."""
        for at, (its_settings, form, plan) in enumerate(self._plans):
            if its_settings == settings and form.fits(source):
                self._plans.append(self._plans.pop(at))
                return plan
        plan = RefreshPlan(source, settings, ranks)
        self._plans = [*self._plans[1 - _MAX_PLANS :], (settings, SourceForm(source), plan)]
        return plan

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()


def _picked(tensors: Sequence[torch.Tensor], numbers: list[int]) -> Sequence[torch.Tensor]:
    return tensors if len(numbers) == len(tensors) else operator.itemgetter(*numbers, numbers[-1])(tensors)[:-1]
