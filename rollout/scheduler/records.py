"""The records of requests: a step's results enter them, and they become the messages that leave the scheduler.

    sampled tokens and scores -- SampledRows, enter_scores --> records of Req -- RecordReader --> ReqOutput

The route rows of a token come from the forward that computed the KV in its slot.  If a retraction gave that slot up,
they come from the rows that were saved then.

Shapes: N requests that sample, one row of logits each; n tokens of a request, L MoE layers, K top-k.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import compress, count

import msgspec
import numpy as np
import torch

from capture.slot_store import RouteSlotStore
from rollout.core.messages.req_output import (
    FinishedRecord,
    FinishReason,
    LogprobDelta,
    ReqOutput,
    RoutedExpertsPayload,
    StreamedRows,
    VersionSpan,
)
from rollout.grammar.restriction import Restriction
from rollout.grammar.rows import RestrictedRows
from rollout.memory.cache_manager import CacheManager
from rollout.memory.kv_pool import KVPool
from rollout.model.model_state import ModelState, ServingEpoch
from rollout.sampling.base import SampledTokens, ScoredTokens
from rollout.sampling.batch_info import SamplingBatchInfo
from rollout.sampling.row_lists import RowLists
from rollout.scheduler.alternatives import host_floats, host_ids
from rollout.scheduler.pooling import pooled_rows
from rollout.scheduler.record_parts import mask_delta, prompt_logprobs
from rollout.scheduler.req import Req, SavedRows
from rollout.scheduler.stop import StopChecker

_MAX_END_IDS = 4096  # of all rows together, collected whenever a row joins or leaves


class SampledRows:
    """The requests that sample in a step, and the outputs that each of them wants, looked up once.

    This object is kept while the requests stay the same, so that a step costs each of them two appends.  `info` is the
    sampler's input for the rows.  `enter` sets `req.finished`; the scheduler acts on it.
    """

    def __init__(
        self,
        reqs: Sequence[Req],
        stop: StopChecker,
        vocab_size: int,
        device: torch.device | str = "cpu",
        lists: RowLists | None = None,
    ) -> None:
        """Prepare the rows.  `lists` holds the lists of requests, each by its row in the slot table."""
        wants = [req.sampling_row for req in reqs]
        self.info = SamplingBatchInfo(wants, vocab_size, device, lists, [req.pool_index for req in reqs])
        self.reqs = reqs
        self._stop = stop
        self._marked_epoch: ServingEpoch | None = None
        self._end_ids = _joined({req.end_ids for req in reqs})
        self._append_token = [want.output_ids.append for want in wants]
        wants_logprob = [want.wants_logprob for want in wants]
        self._append_logprob = [(row, reqs[row].output.logprobs.append) for row in compress(count(), wants_logprob)]
        more = [row for row, want in enumerate(wants) if want.wants_more]
        self._top_rows = [row for row in more if wants[row].top_logprobs]
        self._chosen_rows = [row for row in more if wants[row].chosen_ids]
        self._mask_rows = [row for row in more if wants[row].wants_mask]
        self._stop_string_rows = [row for row, req in enumerate(reqs) if req.stop_text is not None]
        self._restricted = [(row, reqs[row], _restriction(reqs[row])) for row in self.info.restricted]
        self._alone = [(row, req, each) for row, req, each in self._restricted if each.ends_alone]
        self._streams = any(req.source.stream for req in reqs)

    def restrict(self) -> None:
        """Write the tokens that each row may sample next into `info`.  All tokens before are known."""
        for _, req, restriction in self._restricted:
            restriction.follow(req.output_ids)
        self._sets.write()

    @cached_property
    def _sets(self) -> RestrictedRows:
        return RestrictedRows([restriction for _, _, restriction in self._restricted], self.info.allowed_GW)

    def enter(self, tokens: SampledTokens, epoch: ServingEpoch, last: Sequence[int], ended: Sequence[int]) -> list[Req]:
        """Append a step of `epoch` to the records.  Returns the requests with news to send: finished, or streaming.

        The rows `last` have all their tokens after this step.  The requests of the rows `ended` had ended before, so
        their sampled tokens are dropped.  A token whose mask is over the limit, or in whose place no token was
        allowed, is dropped, too, and its request ends.
        """
        refused: list[Req] = []
        if self._restricted:
            refused, ended = self._refuse_failed(ended)
        if self._mask_rows:
            too_large, ended = self._append_masks(tokens, ended)
            refused += too_large
        if self._append_logprob:
            self._append_logprobs(tokens, ended)
        if epoch is not self._marked_epoch:
            for row, req in enumerate(self.reqs):
                if row not in ended:
                    req.output.versions.note(epoch, len(req.output_ids))
            self._marked_epoch = epoch
        token_ids_N = tokens.token_ids.tolist()
        appends = self._append_token
        if ended:
            appends = [_drop if row in ended else append for row, append in enumerate(appends)]
        for append, token_id in zip(appends, token_ids_N):
            append(token_id)
        finished = refused + self._check_finished(token_ids_N, last, ended)
        if not self._streams:
            return finished
        running = refused + [req for row, req in enumerate(self.reqs) if row not in ended]
        return [req for req in running if req.finished or req.source.stream]

    def _check_finished(self, token_ids_N: list[int], last: Sequence[int], ended: Sequence[int]) -> list[Req]:
        """Return the requests that finish by an end token, a stop string or the length.

        Only rows that can have finished are checked.
        """
        rows: Sequence[int] = self._stop_string_rows
        if self._alone:
            rows = sorted({*rows, *self._complete_rows()}.difference(ended))
        if last or ended or self._end_ids is None or not self._end_ids.isdisjoint(token_ids_N):
            at_end = [row for row, token_id in enumerate(token_ids_N) if token_id in self.reqs[row].end_ids]
            if last or ended or at_end:
                rows = sorted({*rows, *last, *at_end}.difference(ended))
        finished = []
        for row in rows:
            req = self.reqs[row]
            req.finished = self._stop.check(req)
            if req.finished:
                finished.append(req)
        return finished

    def _complete_rows(self) -> list[int]:
        """Return the rows that end without a token, and whose grammar is complete."""
        complete = []
        for row, req, restriction in self._alone:
            restriction.follow(req.output_ids)
            if restriction.is_complete:
                complete.append(row)
        return complete

    def _refuse_failed(self, ended: Sequence[int]) -> tuple[list[Req], list[int]]:
        """Return the requests that end as they may sample no token, and the rows whose token is dropped."""
        refused, dropped = [], list(ended)
        for row, req, restriction in self._restricted:
            failure = None if row in ended else restriction.failure
            if failure is not None and failure[0] == len(req.output_ids):
                req.finished = FinishReason(type="abort", message=failure[1], status_code=400)
                refused.append(req)
                dropped.append(row)
        return refused, dropped

    def _append_masks(self, tokens: SampledTokens, ended: Sequence[int]) -> tuple[list[Req], list[int]]:
        """Append the masks of the step to the records.

        Returns the requests that end as their mask is over the limit, and the rows whose token is dropped.
        """
        counts_N = tokens.kept_counts.tolist()
        begins_N = tokens.kept_begins().tolist()
        ids_M = tokens.kept_ids.flatten().cpu().numpy()
        logprobs_M = tokens.kept_logprobs.flatten().float().cpu().numpy()
        sampled_N = tokens.token_ids.tolist()
        refused, dropped = [], list(ended)
        for row in self._mask_rows:
            if row in ended:
                continue
            req, count = self.reqs[row], counts_N[row]
            req.finished = self._stop.mask_refusal(req, count)
            if req.finished:
                refused.append(req)
                dropped.append(row)
                continue
            kept = slice(begins_N[row], begins_N[row] + count)
            ids, logprobs = ids_M[kept].copy(), logprobs_M[kept]  # the record outlives the step's other samples
            req.output.kept_ids.append(ids)
            req.output.num_mask_ids += count
            req.output.mask_logprobs.append(float(logprobs[np.searchsorted(ids, sampled_N[row])]))
            if req.source.sampling_logprobs_mode == "support":
                req.output.kept_logprobs.append(logprobs.copy())
        return refused, dropped

    def _append_logprobs(self, tokens: SampledTokens, ended: Sequence[int]) -> None:
        values = tokens.logprobs.tolist()
        for row, append in self._append_logprob:
            if row not in ended:
                append(values[row])
        if self._top_rows:
            best, ids = host_floats(tokens.top_logprobs), host_ids(tokens.top_ids)
            for row in self._top_rows:
                if row not in ended:
                    count = self.reqs[row].source.top_logprobs_num
                    self.reqs[row].output.alternatives.append_top(best[row, :count], ids[row, :count])
        if self._chosen_rows:
            chosen, end = host_floats(tokens.chosen_logprobs), 0
            for row in self._chosen_rows:
                begin, end = end, end + len(self.reqs[row].sampling_row.chosen_ids)
                if row not in ended:
                    self.reqs[row].output.alternatives.append_chosen(chosen[begin:end])


def _restriction(req: Req) -> Restriction:
    assert req.restriction is not None, "its row is restricted"
    return req.restriction


def _joined(end_ids: Collection[frozenset[int]]) -> frozenset[int] | None:
    """Return the ids that end any row; None if they are too many, so that each row is checked by itself."""
    return frozenset().union(*end_ids) if sum(map(len, end_ids)) <= _MAX_END_IDS else None


def enter_scores(req: Req, scored: ScoredTokens, epoch: ServingEpoch) -> None:
    """Append log-probabilities of prompt tokens, from a step of `epoch`."""
    record = req.prompt_record
    assert record is not None
    record.versions.note(epoch, len(record.values))
    record.values += scored.logprobs.tolist()
    if req.source.top_logprobs_num:
        record.alternatives.append_top(host_floats(scored.top_logprobs), host_ids(scored.top_ids))
    if req.source.token_ids_logprob:
        record.alternatives.append_chosen(host_floats(scored.chosen_logprobs))


class RecordReader:
    """Builds `ReqOutput`s and saves rows over retractions.  Of a request it changes only `num_sent`."""

    def __init__(self, cache: CacheManager, kv_pool: KVPool, state: ModelState, routes: RouteSlotStore | None) -> None:
        self._cache = cache
        self._kv_pool = kv_pool
        self._state = state
        self._route_store = routes

    def save_rows(self, req: Req) -> None:
        """Keep the rows of `req` that the record needs, before its slots are given up."""
        slots = self._slots(req)
        epochs = self._kv_pool.epochs(slots)
        if len(epochs):
            oldest = int(epochs.min())
            req.oldest_epoch = oldest if req.oldest_epoch is None else min(req.oldest_epoch, oldest)
            req.given_up_epochs = epochs[: req.prompt_len]
        if self._route_store is None or not req.source.return_routed_experts:
            return
        kept = len(req.saved_rows.epochs) if req.saved_rows else 0
        if len(slots) > kept:
            req.saved_rows = SavedRows(*self._rows(req, slots, 0, len(slots)))

    def oldest_epoch_held(self, req: Req) -> int | None:
        """Return the oldest weight epoch of the KV that `req` holds now; None if it holds none."""
        epochs = self._kv_pool.epochs(self._slots(req))
        return int(epochs.min()) if len(epochs) else None

    def oldest_epoch_used(self, req: Req) -> int | None:
        """Return the oldest weight epoch of the KV that `req` holds or gave up in retractions.

        Returns None if it never held any.
        """
        return _oldest(self._kv_pool.epochs(self._slots(req)), req)

    def output(self, req: Req) -> ReqOutput:
        """Return the tokens since the last call, and the finished record once `req.finished` is set."""
        record, first = req.output, req.num_sent
        req.num_sent = len(req.output_ids)
        version = record.versions.last_version
        logprobs = None
        if req.source.return_logprob:
            logprobs = LogprobDelta(values=record.logprobs[first:], alternatives=record.alternatives.message(first))
        return ReqOutput(
            rid=req.rid,
            token_ids=req.output_ids[first:],
            num_output_tokens=len(req.output_ids),
            weight_version=self._state.epoch.weight_version if version is None else version,
            logprobs=logprobs,
            mask=mask_delta(req, first) if req.source.return_sampling_mask else None,
            finished=self._finished(req, req.finished) if req.finished else None,
            adapter=None if req.adapter is None else req.adapter.label,
            rows=self._streamed(req, first) if req.source.stream_rows and not req.finished else None,
        )

    def _streamed(self, req: Req, first: int) -> StreamedRows:
        """Return the rows of the tokens from output token `first` on, which were not sent yet."""
        spans = req.output.versions.spans(len(req.output_ids))
        versions = [msgspec.structs.replace(span, start=max(span.start, first)) for span in spans if span.end > first]
        begin = req.prompt_len + first - 1 if first else 0
        return StreamedRows(versions=versions, routes=self._routes(req, self._slots(req), begin))

    def _finished(self, req: Req, reason: FinishReason) -> FinishedRecord:
        slots = self._slots(req)
        epochs = self._kv_pool.epochs(slots)
        oldest, times = _oldest(epochs, req), req.times
        return FinishedRecord(
            reason=reason,
            since_first_token_s=0.0 if times.first_token is None else time.monotonic() - times.first_token,
            queue_s=0.0 if times.admitted is None else times.admitted - times.received,
            cached_tokens=req.cached_tokens,
            num_retractions=req.num_retractions,
            weight_versions=req.output.versions.spans(len(req.output_ids)),
            prefill_weight_versions=self._epoch_spans(_prompt_epochs(req, epochs)),
            kv_weight_version_oldest=None if oldest is None else self._state.version_of(oldest),
            kv_weight_epoch_oldest=oldest,
            routed_experts=self._routes(req, slots),
            prompt_logprobs=prompt_logprobs(req.prompt_record) if req.prompt_record else None,
            pooled=pooled_rows(req.output.pool) if req.output.pool and reason.type != "abort" else None,
            hidden_states=req.output.hidden.message() if req.output.hidden else None,
            drafts=req.output.drafts,
        )

    def _routes(self, req: Req, slots: np.ndarray, begin: int = 0) -> RoutedExpertsPayload | None:
        """Return rows `start .. num_tokens - 2` of the routes; fewer only if an abort came before the forward.

        Rows before `begin` are left out.
        """
        if self._route_store is None or not req.source.return_routed_experts:
            return None
        saved = len(req.saved_rows.epochs) if req.saved_rows else 0
        end = min(max(saved, len(slots)), req.num_tokens - 1)
        start = min(max(req.source.routed_experts_start_len, begin), end)
        rows, epochs = self._rows(req, slots, start, end)
        return RoutedExpertsPayload(
            data=rows.tobytes(),
            dtype="uint8" if rows.dtype == np.uint8 else "uint16",
            num_rows=rows.shape[0],
            start=start,
            versions=self._epoch_spans(epochs),
        )

    def _rows(self, req: Req, slots: np.ndarray, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return routes [n, L, K] and epochs [n] of tokens `start .. end - 1`; saved rows win over recomputed ones.

        `slots` belong to the tokens whose KV is there.
        """
        assert self._route_store is not None
        saved = req.saved_rows
        kept = min(len(saved.epochs), end) if saved else 0
        held = slots[max(start, kept) : end]
        routes, epochs = self._route_store.read(held), self._kv_pool.epochs(held)
        if saved is None or kept <= start:
            return routes, epochs
        return np.concatenate([saved.routes[start:kept], routes]), np.concatenate([saved.epochs[start:kept], epochs])

    def _slots(self, req: Req) -> np.ndarray:
        """Return the slots of the tokens whose KV is there, and part of the record [recorded_len]."""
        if req.recorded_len == 0:
            return np.empty(0, dtype=np.int64)
        return self._cache.pool.span(req.pool_index, 0, req.recorded_len)

    def _epoch_spans(self, epochs: np.ndarray) -> list[VersionSpan]:
        """Return runs of equal epochs as half-open spans over the rows given."""
        if not len(epochs):
            return []
        version_of, first = self._state.version_of, int(epochs[0])
        if _is_uniform(epochs):  # no refresh came in between
            return [VersionSpan(version_of(first), 0, len(epochs), first)]
        ends = [*(np.flatnonzero(epochs[1:] != epochs[:-1]) + 1).tolist(), len(epochs)]
        starts = [0, *ends[:-1]]
        return [
            VersionSpan(version_of(epoch), start, end, epoch)
            for epoch, start, end in zip(epochs[starts].tolist(), starts, ends)
        ]


def _oldest(epochs: np.ndarray, req: Req) -> int | None:
    """Return the oldest weight epoch of the KV that `req` holds or gave up; None if it never held any.

    `epochs` are of the KV that it holds.
    """
    known = [] if req.oldest_epoch is None else [req.oldest_epoch]
    if len(epochs):
        known.append(int(epochs[0] if _is_uniform(epochs) else epochs.min()))
    return min(known, default=None)


def _is_uniform(epochs: np.ndarray) -> bool:
    """Return whether all epochs are equal.  Bytes are compared: numpy's reductions take longer to begin."""
    return epochs.tobytes() == epochs[:1].tobytes() * len(epochs)


def _prompt_epochs(req: Req, epochs: np.ndarray) -> np.ndarray:
    """Return the epochs of the prompt's KV: of the KV that `req` holds, then of KV that the last retraction gave up."""
    held = epochs[: req.prompt_len]
    if req.given_up_epochs is None or len(held) >= len(req.given_up_epochs):
        return held
    return np.concatenate([held, req.given_up_epochs[len(held) :]])


def _drop(_: int) -> None:
    """Drop a token, in place of the append of a row that has ended."""
