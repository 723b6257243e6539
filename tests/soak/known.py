"""The contents and names that were in force, by epoch, for the judges."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.soak.samples import Epoch, Span, Violation


class Known:
    """`contents[e]`: the tensors that were in force as epoch e; `labels[e]`: the names of that epoch."""

    def __init__(self) -> None:
        self.contents: dict[Epoch, Mapping[str, torch.Tensor]] = {}
        self.labels: dict[Epoch, set[str]] = {}

    def epochs_of(self, span: Span, what: str) -> list[Epoch]:
        """Return the epochs that a span can mean, ascending: several if its label is reused.  Raises `Violation`."""
        found = [epoch for epoch, labels in self.labels.items() if span.label in labels]
        if span.epoch is not None:
            found = [epoch for epoch in found if epoch == span.epoch]
        if not found:
            epoch = "" if span.epoch is None else f" of epoch {span.epoch}"
            raise Violation(f"{what} are said to be of {span.label!r}{epoch}, which was never in force")
        return found
