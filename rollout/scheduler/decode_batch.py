"""`DecodeBatch`: the requests that decode, in order, and what a step needs of them as arrays.

The arrays get and lose columns as requests join and leave, and advance in place from step to step; `check` compares
them with what the requests say.  Does not know the policy, the KV pool or sampling.

Shapes: B requests of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from rollout.model_executor.input_builder import DecodeInput
from rollout.scheduler.req import Req


class DecodeBatch:
    """Requests that have `device_len == num_tokens - 1`.

    A request's place in `reqs` is its row in `inputs` and in `output_counts` [B] int64, which counts its output tokens.
    These tensors are the live arrays, on the host: a step reads them before it calls `advance`.  `generation` changes
    whenever `reqs` does.
    """

    def __init__(self) -> None:
        self.reqs: Sequence[Req] = ()
        self.generation = 0
        self._set_members([], torch.empty(5, 0, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self.reqs)

    def join(self, reqs: Iterable[Req]) -> None:
        """Append requests whose known tokens but the last have their KV."""
        joining = list(reqs)
        assert all(req.device_len == req.num_tokens - 1 for req in joining), "a request decodes once it is prefilled"
        for req in joining:
            req.is_decoding = True
        if joining:
            columns = torch.tensor([_column(req) for req in joining]).T
            self._set_members([*self.reqs, *joining], torch.cat([self._columns(), columns], dim=1))

    def drop_finished(self) -> None:
        self._keep([row for row, req in enumerate(self.reqs) if not req.finished])

    def remove(self, *leaving: Req) -> None:
        """Let requests go; those that are not in the batch are ignored."""
        gone = set(leaving)
        self._keep([row for row, req in enumerate(self.reqs) if req not in gone])

    def advance(self, token_ids_B: torch.Tensor) -> None:
        """The KV of every request's newest token is computed, and `token_ids_B` int64 were sampled after them.

        They become the next input as they are; the caller appends them to the records and does not change them.
        """
        self._counters_3B += 1
        self.inputs.input_ids = token_ids_B

    def check(self) -> None:
        """Assert that the arrays say what the requests say.  For tests; valid between steps."""
        inputs = self.inputs
        arrays = (inputs.input_ids, inputs.pool_indices, inputs.positions, inputs.seq_lens, self.output_counts)
        columns = list(zip(*(array.tolist() for array in arrays), strict=True))
        assert columns == [_column(req) for req in self.reqs], "the arrays and the requests differ"
        assert inputs.rows.tolist() == list(range(len(self.reqs)))

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self.reqs):
            return
        staying = [self.reqs[row] for row in rows]
        for req in set(self.reqs).difference(staying):
            device_len, req.is_decoding = req.device_len, False
            req.device_len = device_len
        self._set_members(staying, self._columns_of(rows))

    def _columns_of(self, rows: list[int]) -> torch.Tensor:
        return self._columns().index_select(1, torch.tensor(rows, dtype=torch.int64))

    def _columns(self) -> torch.Tensor:
        """[5, B]: a column as `_column` gives it for each request."""
        inputs = self.inputs
        ids_and_rows = torch.stack([inputs.input_ids.cpu(), inputs.pool_indices])
        return torch.cat([ids_and_rows, torch.from_numpy(self._counters_3B)])

    def _set_members(self, reqs: list[Req], columns: torch.Tensor) -> None:
        self.reqs = reqs
        self.generation += 1
        input_ids, pool_indices, positions, seq_lens, self.output_counts = columns.unbind()
        self._counters_3B = columns[2:].numpy()  # the memory of the last three: they grow by one in every step
        self.inputs = DecodeInput(input_ids, pool_indices, positions, seq_lens, rows=torch.arange(len(reqs)))


def _column(req: Req) -> tuple[int, int, int, int, int]:
    output = req.output.token_ids
    return output[-1], req.pool_index, req.device_len, req.device_len + 1, len(output)
