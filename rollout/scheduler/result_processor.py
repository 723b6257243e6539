"""What a step's results mean for its requests: log-probabilities, tokens, finishes.

Knows plans, requests, sampling.  Does not know queues' order, sockets or weights.

N rows sampled in the step, T its tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.core.io_struct import FinishReason
from rollout.model_executor.model_runner import ModelRunner
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.sampling.sampler import SampledTokens, chosen_logprobs, sample, top_logprobs
from rollout.scheduler.policy import Extend, StepPlan
from rollout.scheduler.req import Req
from rollout.scheduler.stop import StopChecker


class ResultProcessor:
    """Turns hidden states into record entries.  Sets `req.finished`; the scheduler acts on it."""

    def __init__(self, runner: ModelRunner, stop: StopChecker, vocab_size: int, device: torch.device | str) -> None:
        self._runner = runner
        self._stop = stop
        self._vocab_size = vocab_size
        self._device = device
        self._info_reqs: list[Req] = []
        self._info = SamplingBatchInfo([], vocab_size, device)

    def process(self, plan: StepPlan, hidden_TD: torch.Tensor, logits_NV: torch.Tensor) -> list[Req]:
        """Enter the step into the records.  Returns the requests that got a token or finished.

        `logits_NV` has a row for each sampling request: those that complete their prompt, then those that decode.
        """
        self._score_prompts(plan.extends, hidden_TD)
        for item in plan.extends:
            item.req.device_len += item.count
        for req in plan.decodes:
            req.device_len += 1
        scored = [item.req for item in plan.extends if item.completes and not item.req.samples]
        for req in scored:
            req.finished = FinishReason(type="length", length=0)
        sampled = [item.req for item in plan.extends if item.completes and item.req.samples] + plan.decodes
        if sampled:
            self._sample(sampled, logits_NV)
        return scored + sampled

    @torch.inference_mode()
    def _sample(self, reqs: list[Req], logits_NV: torch.Tensor) -> None:
        info = self._batch_info(reqs)
        positions_N = torch.tensor([len(req.output.token_ids) for req in reqs])
        tokens = sample(logits_NV, info, positions_N)
        with_logprobs = [i for i, req in enumerate(reqs) if req.source.return_logprob]
        if with_logprobs:
            self._record_logprobs(reqs, with_logprobs, tokens)
        version = self._runner.state.epoch.weight_version
        for req, token in zip(reqs, tokens.token_ids.tolist()):
            req.output.append(token, version)
            req.finished = self._stop.check(req)

    def _batch_info(self, reqs: list[Req]) -> SamplingBatchInfo:
        """The tensors of the last step if it sampled the same requests."""
        if reqs != self._info_reqs:
            rows = [
                SamplingRow(req.sampling_params, req.seed, tuple(req.end_ids), req.prompt_ids, req.output.token_ids)
                for req in reqs
            ]
            self._info_reqs, self._info = list(reqs), SamplingBatchInfo(rows, self._vocab_size, self._device)
        return self._info

    @staticmethod
    def _record_logprobs(reqs: list[Req], rows: list[int], tokens: SampledTokens) -> None:
        values = tokens.logprobs().tolist()
        for i in rows:
            reqs[i].output.logprobs.append(values[i])
        wants_top = [i for i in rows if reqs[i].source.top_logprobs_num]
        if wants_top:
            width = max(reqs[i].source.top_logprobs_num for i in wants_top)
            best, ids = (x.tolist() for x in top_logprobs(tokens.scaled_logits_NV[wants_top], width))
            for k, i in enumerate(wants_top):
                count = reqs[i].source.top_logprobs_num
                reqs[i].output.top.append((best[k][:count], ids[k][:count]))
        for i in rows:
            chosen = reqs[i].source.token_ids_logprob
            if chosen:
                reqs[i].output.chosen.append(chosen_logprobs(tokens.scaled_logits_NV[i : i + 1], chosen)[0].tolist())

    @torch.inference_mode()
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
        temperature = req.sampling_params.effective_temperature
        for logits_NV in self._runner.logits_in_chunks(hidden_ND):
            count = logits_NV.shape[0]
            if temperature != 1.0:
                logits_NV = logits_NV / temperature
            targets = torch.tensor(req.prompt_ids[position : position + count], device=logits_NV.device)
            record.values += SampledTokens(targets, logits_NV).logprobs().tolist()
            if source.top_logprobs_num:
                best, ids = top_logprobs(logits_NV, source.top_logprobs_num)
                record.top += list(zip(best.tolist(), ids.tolist()))
            if source.token_ids_logprob:
                record.chosen += chosen_logprobs(logits_NV, source.token_ids_logprob).tolist()
            position += count
