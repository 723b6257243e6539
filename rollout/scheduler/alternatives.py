"""`AlternativesRecord`: log-probabilities of the likeliest and of chosen tokens, next to a growing record.

Rows are kept as bytes: with hundreds of entries at each token, Python numbers would cost more than the forward.

Shapes: n tokens, K likeliest ones at each place, C chosen ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from rollout.core.messages.req_output import Alternatives


@dataclass(eq=False, slots=True)
class AlternativesRecord:
    """Append-only record: each list has an entry of one or more rows for each append, or stays empty."""

    is_wide: bool = False  # float64
    top_logprobs: list[bytes] = field(default_factory=list)
    top_ids: list[bytes] = field(default_factory=list)
    chosen_logprobs: list[bytes] = field(default_factory=list)

    def append_top(self, logprobs: np.ndarray, ids: np.ndarray) -> None:
        """Append the likeliest tokens, best first: [n, K] or [K] of `host_floats` and of `host_ids`."""
        self.is_wide = logprobs.dtype.itemsize == 8
        self.top_logprobs.append(logprobs.tobytes())
        self.top_ids.append(ids.tobytes())

    def append_chosen(self, logprobs: np.ndarray) -> None:
        """Append [n, C] or [C] of `host_floats`."""
        self.is_wide = logprobs.dtype.itemsize == 8
        self.chosen_logprobs.append(logprobs.tobytes())

    def message(self, first: int = 0) -> Alternatives | None:
        """Return everything appended from the append `first` on; None if nothing ever was."""
        if not self.top_ids and not self.chosen_logprobs:
            return None
        return Alternatives(
            dtype="float64" if self.is_wide else "float32",
            top_logprobs=b"".join(self.top_logprobs[first:]),
            top_ids=b"".join(self.top_ids[first:]),
            chosen_logprobs=b"".join(self.chosen_logprobs[first:]),
        )


def host_floats(logprobs: torch.Tensor) -> np.ndarray:
    """Copy log-probabilities to the host, as little-endian float32 or float64."""
    array = logprobs.cpu().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def host_ids(token_ids: torch.Tensor) -> np.ndarray:
    """Copy ids to the host, as little-endian int32."""
    return token_ids.cpu().numpy().astype("<i4")
