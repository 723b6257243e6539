"""`SampledRows`: the requests that sample in a step, and what each of them wants, looked up once.

Kept while the requests stay the same, so that a step costs each of them two appends.  Writes records; does not know
plans, queues or the model.

Shapes: N requests, one row of logits each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch

from rollout.model_executor.model_state import ServingEpoch
from rollout.sampling.base import SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo
from rollout.scheduler.req import Req
from rollout.scheduler.stop import StopChecker


class SampledRows:
    """`info` is what the sampler needs of the rows.  `enter` sets `req.finished`; the scheduler acts on it."""

    def __init__(
        self, reqs: Sequence[Req], stop: StopChecker, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.info = SamplingBatchInfo([req.sampling_row for req in reqs], vocab_size, device)
        self._reqs = reqs
        self._stop = stop
        self._marked_epoch: ServingEpoch | None = None
        self._end_ids = frozenset().union(*[req.end_ids for req in reqs])  # of any row
        self._steps_left = min([req.source.sampling_params.max_new_tokens - len(req.output.token_ids) for req in reqs])
        self._append_token = [req.output.token_ids.append for req in reqs]
        self._append_logprob: list[tuple[int, Callable[[float], None]]] = []
        self._top_rows: list[int] = []
        self._with_chosen: list[Req] = []
        self._stop_string_rows: list[int] = []
        self._streams = False
        for row, req in enumerate(reqs):
            wants = req.sampling_row
            if wants.wants_logprob:
                self._append_logprob.append((row, req.output.logprobs.append))
            if wants.top_logprobs:
                self._top_rows.append(row)
            if wants.chosen_ids:
                self._with_chosen.append(req)
            if req.stop_text is not None:
                self._stop_string_rows.append(row)
            if req.source.stream:
                self._streams = True

    def enter(self, tokens: SampledTokens, epoch: ServingEpoch) -> list[Req]:
        """Append a step of `epoch` to the records.  Returns the requests with news to send: finished, or streaming."""
        if self._append_logprob:
            self._append_logprobs(tokens)
        if epoch is not self._marked_epoch:
            for req in self._reqs:
                req.output.versions.note(epoch, len(req.output.token_ids))
            self._marked_epoch = epoch
        token_ids_N = tokens.token_ids.tolist()
        for append, token_id in zip(self._append_token, token_ids_N):
            append(token_id)
        finished = self._check_finished(token_ids_N)
        if not self._streams:
            return finished
        return [req for req in self._reqs if req.finished or req.source.stream]

    def _check_finished(self, token_ids_N: list[int]) -> list[Req]:
        """Looks closely only at rows that can have finished: an end token, a stop string, the length."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            rows: Sequence[int] = range(len(self._reqs))
        else:
            rows = self._stop_string_rows
            if not self._end_ids.isdisjoint(token_ids_N):
                rows = sorted({*rows, *(row for row, id in enumerate(token_ids_N) if id in self._end_ids)})
        finished = []
        for row in rows:
            req = self._reqs[row]
            req.finished = self._stop.check(req)
            if req.finished:
                finished.append(req)
        return finished

    def _append_logprobs(self, tokens: SampledTokens) -> None:
        values = tokens.logprobs.tolist()
        for row, append in self._append_logprob:
            append(values[row])
        if self._top_rows:
            best, ids = tokens.top_logprobs.tolist(), tokens.top_ids.tolist()
            for row in self._top_rows:
                count = self._reqs[row].source.top_logprobs_num
                self._reqs[row].output.top.append((best[row][:count], ids[row][:count]))
        if self._with_chosen:
            chosen = iter(tokens.chosen_logprobs.tolist())
            for req in self._with_chosen:
                req.output.chosen.append(list(islice(chosen, len(req.sampling_row.chosen_ids))))
