"""What a step's results mean for its requests: log-probabilities, tokens, finishes.

Knows plans, requests, sampling.  Does not know queues' order, sockets or weights.

N rows sampled in the step, T its tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.core.io_struct import FinishReason
from rollout.model_executor.model_runner import ModelRunner
from rollout.sampling.base import Sampler
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.policy import Extend, StepPlan
from rollout.scheduler.req import Req
from rollout.scheduler.sampled_rows import SampledRows
from rollout.scheduler.stop import StopChecker


class ResultProcessor:
    """Turns hidden states into record entries.  Sets `req.finished`; the scheduler acts on it."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        stop: StopChecker,
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._stop = stop
        self._vocab_size = vocab_size
        self._device = device
        self._decoding: SampledRows | None = None  # of generation `_generation` of the decode batch
        self._generation = -1

    def process(self, plan: StepPlan, hidden_TD: torch.Tensor, logits_NV: torch.Tensor) -> list[Req]:
        """Enter the step into the records.  Returns the requests that have something to send: finished or streaming.

        `logits_NV` has a row for each sampling request: those that complete their prompt, then those that decode.
        """
        outgoing: list[Req] = []
        if plan.extends:
            outgoing, first_decode = self._process_extends(plan.extends, hidden_TD, logits_NV)
            logits_NV = logits_NV[first_decode:]
        if plan.decodes:
            rows = self._rows_of(plan.decodes)
            tokens = self._sampler.sample(logits_NV, rows.info, plan.decodes.output_counts)
            plan.decodes.advance(tokens.token_ids)
            outgoing += rows.enter(tokens, self._runner.state.epoch)
        return outgoing

    def _process_extends(
        self, extends: Sequence[Extend], hidden_TD: torch.Tensor, logits_NV: torch.Tensor
    ) -> tuple[list[Req], int]:
        """The part of `process` for prompts.  Also returns how many rows of `logits_NV` were theirs."""
        self._score_prompts(extends, hidden_TD)
        for item in extends:
            item.req.device_len += item.count
        completed = [item.req for item in extends if item.completes]
        outgoing = [req for req in completed if not req.samples]
        for req in outgoing:
            req.finished = FinishReason(type="length", length=0)
        sampling = [req for req in completed if req.samples]
        if sampling:
            rows = SampledRows(sampling, self._stop, self._vocab_size, self._device)
            output_counts = torch.tensor([len(req.output.token_ids) for req in sampling])
            tokens = self._sampler.sample(logits_NV[: len(sampling)], rows.info, output_counts)
            outgoing += rows.enter(tokens, self._runner.state.epoch)
        return outgoing, len(sampling)

    def _rows_of(self, decodes: DecodeBatch) -> SampledRows:
        """What was looked up for the last step if the same requests decode now."""
        if self._decoding is None or self._generation != decodes.generation:
            self._decoding = SampledRows(decodes.reqs, self._stop, self._vocab_size, self._device)
            self._generation = decodes.generation
        return self._decoding

    def _score_prompts(self, extends: Sequence[Extend], hidden_TD: torch.Tensor) -> None:
        """Log-probabilities of prompt tokens from the rows that predict them, of the raw distribution at temperature.

        Row r of an extend is position `start + r` and predicts token `start + r + 1`.
        """
        offset = 0
        for item in extends:
            record = item.req.prompt_record
            if record is not None:
                first = max(item.start, record.next_position)
                last = min(item.start + item.count, item.req.prompt_len - 1)  # exclusive
                if first < last:
                    rows = hidden_TD[offset + first - item.start : offset + last - item.start]
                    self._score_rows(item.req, rows, first + 1)
            offset += item.count

    def _score_rows(self, req: Req, hidden_ND: torch.Tensor, position: int) -> None:
        """Entries for the prompt tokens `position ..`, one a row."""
        record, source = req.prompt_record, req.source
        assert record is not None
        record.versions.note(self._runner.state.epoch, len(record.values))
        temperature = req.sampling_params.effective_temperature
        chosen_ids, top_n = source.token_ids_logprob or [], source.top_logprobs_num
        for logits_NV in self._runner.logits_in_chunks(hidden_ND):
            count = logits_NV.shape[0]
            targets = torch.tensor(req.prompt_ids[position : position + count], device=logits_NV.device)
            scored = self._sampler.score(logits_NV, targets, temperature, chosen_ids, top_n)
            record.values += scored.logprobs.tolist()
            if top_n:
                record.top += list(zip(scored.top_logprobs.tolist(), scored.top_ids.tolist()))
            if chosen_ids:
                record.chosen += scored.chosen_logprobs.tolist()
            position += count
