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
        self.reqs = reqs
        self._stop = stop
        self._marked_epoch: ServingEpoch | None = None
        self._end_ids = frozenset().union(*[req.end_ids for req in reqs])  # of any row
        self._append_token = [req.output.token_ids.append for req in reqs]
        self._append_logprob: list[tuple[int, Callable[[float], None]]] = []
        self._top_rows: list[int] = []
        self._chosen_rows: list[int] = []
        self._stop_string_rows: list[int] = []
        self._streams = False
        for row, req in enumerate(reqs):
            wants = req.sampling_row
            if wants.wants_logprob:
                self._append_logprob.append((row, req.output.logprobs.append))
            if wants.top_logprobs:
                self._top_rows.append(row)
            if wants.chosen_ids:
                self._chosen_rows.append(row)
            if req.stop_text is not None:
                self._stop_string_rows.append(row)
            if req.source.stream:
                self._streams = True

    def enter(self, tokens: SampledTokens, epoch: ServingEpoch, last: Sequence[int], ended: Sequence[int]) -> list[Req]:
        """Append a step of `epoch` to the records.  Returns the requests with news to send: finished, or streaming.

        The rows `last` have all their tokens with it.  The requests of the rows `ended` had ended before: what was
        sampled for them is dropped.
        """
        if self._append_logprob:
            self._append_logprobs(tokens, ended)
        if epoch is not self._marked_epoch:
            for row, req in enumerate(self.reqs):
                if row not in ended:
                    req.output.versions.note(epoch, len(req.output.token_ids))
            self._marked_epoch = epoch
        token_ids_N = tokens.token_ids.tolist()
        appends = self._append_token
        if ended:
            appends = [_drop if row in ended else append for row, append in enumerate(appends)]
        for append, token_id in zip(appends, token_ids_N):
            append(token_id)
        finished = self._check_finished(token_ids_N, last, ended)
        if not self._streams:
            return finished
        running = [req for row, req in enumerate(self.reqs) if row not in ended]
        return [req for req in running if req.finished or req.source.stream]

    def _check_finished(self, token_ids_N: list[int], last: Sequence[int], ended: Sequence[int]) -> list[Req]:
        """Looks closely only at rows that can have finished: an end token, a stop string, the length."""
        rows: Sequence[int] = self._stop_string_rows
        if last or ended or not self._end_ids.isdisjoint(token_ids_N):
            at_end = [row for row, token_id in enumerate(token_ids_N) if token_id in self._end_ids]
            rows = sorted({*rows, *last, *at_end}.difference(ended))
        finished = []
        for row in rows:
            req = self.reqs[row]
            req.finished = self._stop.check(req)
            if req.finished:
                finished.append(req)
        return finished

    def _append_logprobs(self, tokens: SampledTokens, ended: Sequence[int]) -> None:
        values = tokens.logprobs.tolist()
        for row, append in self._append_logprob:
            if row not in ended:
                append(values[row])
        if self._top_rows:
            best, ids = tokens.top_logprobs.tolist(), tokens.top_ids.tolist()
            for row in self._top_rows:
                if row not in ended:
                    count = self.reqs[row].source.top_logprobs_num
                    self.reqs[row].output.top.append((best[row][:count], ids[row][:count]))
        if self._chosen_rows:
            chosen = iter(tokens.chosen_logprobs.tolist())
            for row in self._chosen_rows:
                values_of_row = list(islice(chosen, len(self.reqs[row].sampling_row.chosen_ids)))
                if row not in ended:
                    self.reqs[row].output.chosen.append(values_of_row)


def _drop(_: int) -> None:
    """In place of the append of a row that has ended."""
