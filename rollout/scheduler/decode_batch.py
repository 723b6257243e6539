"""`DecodeBatch`: the requests that decode, in order, and what a step needs of them as arrays.

The arrays change by a column when a request joins or leaves; from step to step they advance in place.  What they hold
is what the requests say, restated; `check` compares the two.  Does not know the policy, the KV pool or sampling.

Shapes: B requests of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from rollout.model_executor.input_builder import DecodeInput
from rollout.scheduler.req import Req

_INPUT_ID, _POOL_INDEX, _POSITION, _SEQ_LEN, _OUTPUT_COUNT = range(5)


class DecodeBatch:
    """At most `capacity` requests, each with `device_len == num_tokens - 1`.

    A request's place in `reqs` is its row in `inputs` and in `output_counts` [B] int64, which counts its output tokens.
    These tensors are the live arrays, on the host: a step reads them before it calls `advance`.  `generation` changes
    whenever `reqs` does.
    """

    def __init__(self, capacity: int) -> None:
        self.reqs: Sequence[Req] = ()
        self.generation = 0
        self._columns = np.zeros((5, capacity), dtype=np.int64)
        self._all_rows = torch.arange(capacity)
        self._set_members([])

    def __len__(self) -> int:
        return len(self.reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self.reqs)

    def join(self, reqs: Iterable[Req]) -> None:
        """Append requests whose known tokens but the last have their KV."""
        members = list(self.reqs)
        for req in reqs:
            assert req.device_len == req.num_tokens - 1, "a request decodes once its prompt is computed"
            self._columns[:, len(members)] = _column(req)
            members.append(req)
        self._set_members(members)

    def keep(self, is_kept: Iterable[bool]) -> None:
        """Let go of the requests for which `is_kept`, in the order of `reqs`, is False."""
        rows = [row for row, kept in enumerate(is_kept) if kept]
        if len(rows) < len(self.reqs):
            self._columns[:, : len(rows)] = self._columns[:, rows]
            self._set_members([self.reqs[row] for row in rows])

    def drop_finished(self) -> None:
        self.keep(not req.finished for req in self.reqs)

    def remove(self, leaving: Req) -> None:
        self.keep(req is not leaving for req in self.reqs)

    def clear(self) -> None:
        self._set_members([])

    def advance(self, token_ids_B: np.ndarray) -> None:
        """The KV of every request's newest token is computed, and `token_ids_B` int64 were sampled after them."""
        self._advancing += 1
        self._input_ids[:] = token_ids_B
        for req in self.reqs:
            req.device_len += 1

    def check(self) -> None:
        """Assert that the arrays say what the requests say.  For tests; valid between steps."""
        for row, req in enumerate(self.reqs):
            assert self._columns[:, row].tolist() == list(_column(req)), f"{req.rid} and its column differ"
        assert len(self.inputs.input_ids) == len(self.output_counts) == len(self.reqs)

    def _set_members(self, reqs: list[Req]) -> None:
        count = len(reqs)
        columns = self._columns[:, :count]
        self.reqs = reqs
        self.generation += 1
        self._input_ids = columns[_INPUT_ID]
        self._advancing = columns[_POSITION:]
        self.inputs = DecodeInput(
            input_ids=torch.from_numpy(columns[_INPUT_ID]),
            pool_indices=torch.from_numpy(columns[_POOL_INDEX]),
            positions=torch.from_numpy(columns[_POSITION]),
            seq_lens=torch.from_numpy(columns[_SEQ_LEN]),
            rows=self._all_rows[:count],
        )
        self.output_counts = torch.from_numpy(columns[_OUTPUT_COUNT])


def _column(req: Req) -> tuple[int, int, int, int, int]:
    output = req.output.token_ids
    return output[-1], req.pool_index, req.device_len, req.device_len + 1, len(output)
