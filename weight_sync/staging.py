"""The sinks of logical tensors: straight into the model, or kept by a transaction until its commit.

DirectSink    into the model: cold load
Staging       `shadow` and `in_model` have them: a live refresh
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from weight_sync.plan import BucketPlan
from weight_sync.tensor_meta import LogicalWeights, Part, parts_of

StagingMode = Literal["host", "device", "journal", "in_place"]
HOLDING_MODES = ("journal", "in_place")
"""`write` changes the model, so that no step may run from the first write to the end."""
Content = torch.Tensor | Part
"""A whole logical tensor, or what this rank holds of it."""


class WeightSink(Protocol):
    """The place where logical tensors land."""

    def write(self, name: str, content: Content) -> None:
        """Take the content of logical tensor `name`, which is the caller's; a `Staging` may read it until `settle`."""

    def read(self, name: str) -> Sequence[Part]:
        """Return what was written under `name` as this rank's places hold it, or will; never to be written to."""


class Staging(WeightSink, Protocol):
    """The store of a transaction's tensors, and its rollback.  Used once.

        (write*  settle)*  ->  prepare  ->  commit  ->  close
                 |                |           |
                 `----------------+-----------`---->  undo

    `write`, `settle` and `prepare` run on the I/O thread, `commit` on the thread that runs steps.
    """

    @property
    def dirty(self) -> bool:
        """True if the model holds anything of this transaction, or may."""

    @property
    def num_bytes(self) -> int:
        """The memory, or disk, that is taken now."""

    @property
    def takes_spans(self) -> bool:
        """True if `write_spans` may be called."""

    def write_spans(self, plan: BucketPlan, content: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Write the planned tensors of a bucket, uint8 [bytes], before they are checked.

        Returns F of each, uint64 [T, 2], and whether it has a value that is not finite, bool [T, 2]: as it was sent,
        and as it is held.
        """

    def settle(self) -> None:
        """Wait until what was written is no longer read from the caller's memory."""

    def prepare(self) -> None:
        """Do all of `commit` that can be done ahead.  The model stays as it is."""

    def commit(self) -> None:
        """Put everything written into the model: it is there when this returns.  Steps in flight read the old."""

    def undo(self) -> None:
        """Restore the old content, bit for bit, and release everything.

        Raises `StagingError`, or what a write raises, when that cannot be done: the model is torn then.
        """

    def close(self) -> None:
        """Release everything without touching the model."""


class DirectSink:
    """Straight into every place of this rank; casts to the parameter's dtype."""

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights

    def write(self, name: str, content: Content) -> None:
        if isinstance(content, Part):
            self._weights.restore(name, content.content)
        else:
            self._weights.write(name, content)

    def read(self, name: str) -> Sequence[Part]:
        return parts_of(self._weights, name)
