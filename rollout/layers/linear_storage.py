"""`LinearStorage`: whether a projection is held in fewer bits than bfloat16, and where its rows lie.

A projection is held as bfloat16 where a rank's shard would cut blocks that share a scale.  All ranks decide alike, as
their shards have equal lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rollout.kernels.held_places import HeldForm
from rollout.kernels.places import Place
from rollout.layers.build import Build
from rollout.layers.shard import Shard
from weight_sync.held_format import HeldFormat


@dataclass(frozen=True)
class LinearStorage:
    """The storage of one matrix.  `plain_reason`: why it is not in the form that was asked for; "" if it is."""

    build: Build
    form: HeldForm | None = None
    plain_reason: str = ""

    @classmethod
    def of(
        cls, build: Build, parts: Mapping[str, Shard], inputs: Shard, orders: Mapping[str, torch.Tensor]
    ) -> LinearStorage:
        """Return the storage of parts that lie one after the other.  `orders`: of parts whose rows are reordered."""
        form = build.ops.storage.linears
        if form is None:
            return cls(build)
        block_rows, block_columns = form.held.block
        start = 0
        for name, rows in parts.items():
            if start % form.row_grain:
                return cls(build, None, f"{name} begins at row {start}, and {form.row_grain} rows share a scale")
            if not rows.is_whole and rows.length % block_rows:
                return cls(build, None, f"{rows.length} rows of {name} on a rank cut blocks of {block_rows}")
            if block_rows > 1 and (rows.sections or name in orders):
                return cls(build, None, f"rows of {name} lie in another order than in their blocks")
            start += rows.length
        if not inputs.is_whole and inputs.length % block_columns:
            return cls(build, None, f"{inputs.length} columns on a rank cut blocks of {block_columns}")
        return cls(build, form)

    @property
    def held(self) -> HeldFormat | None:
        """The format in which values are held; None: as they are sent."""
        return None if self.form is None else self.form.held

    def empty(self, out_features: int, in_features: int) -> torch.Tensor:
        """Make the storage of the matrix."""
        if self.form is None:
            return self.build.empty_matrix(out_features, in_features)
        assert self.build.dtype == torch.bfloat16, self.build.dtype
        return self.form.empty([], out_features, in_features)

    def place(self, weight: torch.Tensor, rows: range, in_features: int) -> Place:
        """Return the place of the logical rows `rows` (step 1): content [len(rows), in_features]."""
        if self.form is None:
            return self.build.ops.storage.matrix_place(weight, rows, in_features)
        return self.form.place(weight, rows, in_features, 1, 0)
