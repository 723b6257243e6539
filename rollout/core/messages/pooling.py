"""Requests that pool: for one row, or a row for each token, of a prompt's last hidden states."""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingKind = Literal["last", "mean", "cls", "all"]


class PoolingParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The choices of a request that pools, after the model's final norm.

    `kind`: the last token's hidden state, the mean of all, the first token's, or every token's.  `scores`: the numbers
    of the label head instead of the hidden states.  Rows are cut to `dimensions`, then scaled to length 1 with
    `normalise`.
    """

    kind: PoolingKind = "last"
    scores: bool = False
    normalise: bool = False
    dimensions: int | None = None

    @property
    def reads_all(self) -> bool:
        """False if the last token's hidden state is enough, so that a cached prefix may be skipped."""
        return self.kind != "last"
