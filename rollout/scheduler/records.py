"""From a request's record to the messages that leave the scheduler.

Pure reading: nothing here changes a request except `num_sent`.  Knows `Req`, the KV pool's epochs and the route store;
does not know batches or sockets.

Rows of a token come from the forward that computed the KV in its slot, or, where a retraction gave that slot up, from
the rows saved then.
"""

from __future__ import annotations

import numpy as np
import torch

from capture.storage import rows_to_numpy
from rollout.core.io_struct import (
    FinishedRecord,
    FinishReason,
    LogprobDelta,
    PromptLogprobs,
    ReqOutput,
    RoutedExpertsPayload,
    VersionSpan,
)
from rollout.mem_cache.kv_pool import KVPool
from rollout.model_executor.model_runner import RouteRecorder
from rollout.model_executor.model_state import ModelState
from rollout.scheduler.cache_manager import CacheManager
from rollout.scheduler.req import PromptRecord, Req, SavedRows


class RecordReader:
    """Builds `ReqOutput`s and saves rows over retractions."""

    def __init__(self, cache: CacheManager, kv_pool: KVPool, state: ModelState, recorder: RouteRecorder | None) -> None:
        self._cache = cache
        self._kv_pool = kv_pool
        self._state = state
        self._recorder = recorder

    def save_rows(self, req: Req) -> None:
        """Before its slots are given up: keep what the record needs of them."""
        epochs = self._epochs(req, 0, req.device_len)
        if epochs.numel():
            oldest = int(epochs.min())
            req.oldest_epoch = oldest if req.oldest_epoch is None else min(req.oldest_epoch, oldest)
        if self._recorder is None or not req.source.return_routed_experts:
            return
        kept = req.saved_rows.epochs.shape[0] if req.saved_rows else 0
        if req.device_len > kept:
            routes, epochs = self._rows(req, req.device_len)
            req.saved_rows = SavedRows(routes, epochs)

    def output(self, req: Req) -> ReqOutput:
        """Tokens since the last call, and the finished record once `req.finished` is set."""
        record, first = req.output, req.num_sent
        req.num_sent = len(record.token_ids)
        logprobs = None
        if req.source.return_logprob:
            logprobs = LogprobDelta(
                values=record.logprobs[first:],
                top=record.top[first:] if req.source.top_logprobs_num else None,
                chosen=record.chosen[first:] if req.source.token_ids_logprob else None,
            )
        return ReqOutput(
            rid=req.rid,
            token_ids=record.token_ids[first:],
            num_output_tokens=len(record.token_ids),
            weight_version=record.version_marks[-1][0] if record.version_marks else self._state.epoch.weight_version,
            logprobs=logprobs,
            finished=self._finished(req, req.finished) if req.finished else None,
        )

    def _finished(self, req: Req, reason: FinishReason) -> FinishedRecord:
        prompt_epochs = self._epochs(req, 0, min(req.device_len, req.prompt_len))
        oldest = [int(self._epochs(req, 0, req.device_len).min())] if req.device_len else []
        if req.oldest_epoch is not None:
            oldest.append(req.oldest_epoch)
        return FinishedRecord(
            reason=reason,
            cached_tokens=req.cached_tokens,
            num_retractions=req.num_retractions,
            weight_versions=_version_spans(req),
            prefill_weight_versions=self._epoch_spans(prompt_epochs),
            kv_weight_version_oldest=self._state.version_of(min(oldest)) if oldest else None,
            routed_experts=self._routes(req),
            prompt_logprobs=_prompt_logprobs(req.prompt_record) if req.prompt_record else None,
        )

    def _routes(self, req: Req) -> RoutedExpertsPayload | None:
        """Rows `start .. num_tokens - 2`; fewer only where an abort came before the forward."""
        if self._recorder is None or not req.source.return_routed_experts:
            return None
        saved = req.saved_rows.epochs.shape[0] if req.saved_rows else 0
        end = min(max(saved, req.device_len), req.num_tokens - 1)
        start = min(req.source.routed_experts_start_len, end)
        routes, epochs = self._rows(req, end)
        rows = rows_to_numpy(routes[start:], self._state.model.config.num_experts)
        return RoutedExpertsPayload(
            data=rows.tobytes(),
            dtype="uint8" if rows.dtype == np.uint8 else "uint16",
            num_rows=rows.shape[0],
            start=start,
            versions=self._epoch_spans(epochs[start:]),
        )

    def _rows(self, req: Req, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes [end, L, K] and epochs [end] of the first tokens; saved rows win over recomputed ones."""
        assert self._recorder is not None
        saved = req.saved_rows
        kept = min(saved.epochs.shape[0], end) if saved else 0
        slots = self._cache.slots(req, kept, end) if end > kept else torch.empty(0, dtype=torch.int64)
        routes, epochs = self._recorder.store.read(slots), self._kv_pool.epoch[slots.cpu()]
        if saved is None:
            return routes, epochs
        return torch.cat([saved.routes[:kept], routes]), torch.cat([saved.epochs[:kept], epochs])

    def _epochs(self, req: Req, start: int, end: int) -> torch.Tensor:
        if end <= start:
            return torch.empty(0, dtype=torch.int32)
        return self._kv_pool.epoch[self._cache.slots(req, start, end).cpu()]

    def _epoch_spans(self, epochs: torch.Tensor) -> list[VersionSpan]:
        """Runs of equal epochs as half-open spans over the rows given."""
        if not epochs.numel():
            return []
        values, counts = torch.unique_consecutive(epochs, return_counts=True)
        ends = counts.cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        return [
            VersionSpan(self._state.version_of(value), start, end)
            for value, start, end in zip(values.tolist(), starts, ends)
        ]


def _version_spans(req: Req) -> list[VersionSpan]:
    marks = req.output.version_marks
    ends = [start for _, start in marks[1:]] + [len(req.output.token_ids)]
    return [VersionSpan(version, start, end) for (version, start), end in zip(marks, ends)]


def _prompt_logprobs(record: PromptRecord) -> PromptLogprobs:
    return PromptLogprobs(start=record.start, values=record.values, top=record.top, chosen=record.chosen)
