"""Hidden states that a request wants of its tokens."""

from __future__ import annotations

import msgspec


class HiddenStatesParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The choices of a request for hidden states.

    `layers`, in the order of the answer: 0 is the embedding, n the residual stream after n layers, and the number of
    layers the output of the final norm.  `start`: the position of the first token that gets a row.
    """

    layers: tuple[int, ...]
    start: int = 0
