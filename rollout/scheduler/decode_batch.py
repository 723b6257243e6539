"""`DecodeBatch`: the requests that decode, in order, and the arrays of them that a step needs.

The arrays get and lose columns as requests join and leave, and advance in place from step to step.  Lengths are
counted, whether or not their tokens have reached the host.  `check` compares the arrays with the requests.

Shapes: B requests of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import torch

from rollout.executor.input_builder import DecodeInput
from rollout.memory.sequence import StepCount
from rollout.scheduler.req import Req


class DecodeBatch:
    """Requests whose tokens have their KV, except the newest token, which may so far be only on the device.

    A request's place in `reqs` is its row in `inputs` and in `output_counts` [B] int64, which counts its output tokens.
    These tensors are the live arrays, on the host: a step reads them before it calls `advance`.  `generation` changes
    whenever `reqs` does; `needs_history`: whether sampling for any of them reads the tokens before.
    """

    def __init__(self) -> None:
        self.reqs: Sequence[Req] = ()
        self.generation = 0
        self.needs_history = False
        self._num_steps = StepCount()
        self._steps_left = 0  # steps until a request has all its tokens; a lower bound once some have left
        self._set_members([], torch.empty(4, 0, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self.reqs)

    def join(self, reqs: Iterable[Req]) -> None:
        """Append requests whose known tokens have their KV, after the launch of the step that samples their next."""
        joining = list(reqs)
        assert all(req.device_len == req.num_tokens for req in joining), "a request decodes once it is prefilled"
        if joining:
            columns = torch.tensor([_column(req, len(req.output_ids) + 1) for req in joining]).T
            for req in joining:
                req.begin_decoding(self._num_steps)
            self.needs_history = self.needs_history or _need_history(joining)
            left = min(_tokens_left(joining, columns[3]))
            self._steps_left = min(self._steps_left, left) if self.reqs else left
            self._set_members([*self.reqs, *joining], torch.cat([self._columns_4B, columns], dim=1))

    def drop_finished(self) -> None:
        self._keep([row for row, req in enumerate(self.reqs) if not req.finished])

    def remove(self, *leaving: Req) -> None:
        """Remove requests; requests that are not in the batch are ignored."""
        removed = set(leaving)
        self._keep([row for row, req in enumerate(self.reqs) if req not in removed])

    def advance(self) -> Sequence[int]:
        """Count the launch of a step that computes the newest token of every request and samples another.

        Returns the rows of the requests that have all their tokens after this step.
        """
        self._num_steps.value += 1
        self._counters_3B += 1
        self._steps_left -= 1
        if self._steps_left > 0:
            return ()
        left = _tokens_left(self.reqs, self.output_counts)
        self._steps_left = min((count for count in left if count > 0), default=0)
        return [row for row, count in enumerate(left) if count <= 0]

    def advance_by(self, counts_B: np.ndarray) -> None:
        """Count the tokens that a verifying step gave each request, int64 [B] on the host, once they are known."""
        for req, count in zip(self.reqs, counts_B.tolist(), strict=True):
            req.grow(count)
        self._counters_3B += counts_B
        left = _tokens_left(self.reqs, self.output_counts)
        self._steps_left = min((count for count in left if count > 0), default=0)

    def check(self, in_flight: Collection[Req] = ()) -> None:
        """Assert that the arrays match the requests.  For tests; valid between steps.

        `in_flight`: the requests for which a step samples whose tokens are not known yet.
        """
        inputs = self.inputs
        arrays = (inputs.pool_indices, inputs.positions, inputs.seq_lens, self.output_counts)
        columns = list(zip(*(array.tolist() for array in arrays), strict=True))
        expected = [_column(req, len(req.output_ids) + (req in in_flight)) for req in self.reqs]
        assert columns == expected, "the arrays and the requests differ"
        assert inputs.rows.tolist() == list(range(len(self.reqs)))
        assert [req.device_len for req in self.reqs] == inputs.positions.tolist(), "lengths were counted wrong"

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self.reqs):
            return
        staying = [self.reqs[row] for row in rows]
        for req in set(self.reqs).difference(staying):
            req.end_decoding()
        self.needs_history = self.needs_history and _need_history(staying)
        self._set_members(staying, self._columns_of(rows))

    def _columns_of(self, rows: list[int]) -> torch.Tensor:
        return self._columns_4B.index_select(1, torch.tensor(rows, dtype=torch.int64))

    def _set_members(self, reqs: list[Req], columns_4B: torch.Tensor) -> None:
        """Set the requests, and for each of them a column as `_column` returns it."""
        self.reqs = reqs
        self.generation += 1
        self._columns_4B = columns_4B
        pool_indices, positions, seq_lens, self.output_counts = columns_4B.unbind()
        self._counters_3B = columns_4B[1:].numpy()  # the same memory: they grow by one in every step
        self.inputs = DecodeInput(pool_indices, positions, seq_lens, rows=torch.arange(len(reqs)))


def _need_history(reqs: Iterable[Req]) -> bool:
    return any(req.sampling_row.has_penalties for req in reqs)


def _tokens_left(reqs: Iterable[Req], counts: torch.Tensor) -> list[int]:
    """Return how many tokens each request still gets, when it has `counts` of them."""
    return [req.sampling_params.max_new_tokens - count for req, count in zip(reqs, counts.tolist(), strict=True)]


def _column(req: Req, num_outputs: int) -> tuple[int, int, int, int]:
    seq_len = req.prompt_len + num_outputs
    return req.pool_index, seq_len - 1, seq_len, num_outputs
