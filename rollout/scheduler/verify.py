"""The part of a step that verifies drafts: its rows, and what is kept of them.

    position        p      p+1    p+2    p+3        of a request whose newest token t is at position p
    input           t      d1     d2     d3         the draft is d1 d2 d3
    sampled         s1     s2     s3     s4         each from the row's own seed, position, mask and penalties
    kept            s1     s2     if d1 == s1, s3 if also d2 == s2, ..

Each row is sampled as plain decoding samples it after the same tokens: so the kept tokens are the ones that plain
decoding gives, and with batch invariance their log-probabilities and routes are the same bits.  The KV of positions
after the last kept input is given back.  Nothing else was written for them.

Shapes: B requests of the decode batch, N rows: for each request one more than its draft has tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from rollout.core.forward_batch import ForwardBatch
from rollout.core.host_copy import to_device
from rollout.distributed.communicator import Communicator
from rollout.drafts.base import Draft
from rollout.executor.input_builder import DecodeInput, ExtendInput
from rollout.grammar.restriction import Restriction
from rollout.grammar.rows import RestrictedRows
from rollout.memory.cache_manager import CacheManager
from rollout.model.model_state import ServingEpoch
from rollout.sampling.base import SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.records import SampledRows
from rollout.scheduler.req import Req
from rollout.scheduler.stop import StopChecker


class VerifiedRows:
    """The rows of a step in which requests of the decode batch have drafts, first these and then the others.

    `drafts` [B] has the draft of each request of `decodes`, in its order.  `info` and `positions` [N] are the
    sampler's inputs.  `pool_indices` and `input_positions` [N] are the places of the rows' input tokens.
    """

    def __init__(
        self,
        decodes: DecodeBatch,
        drafts: Sequence[Draft],
        stop: StopChecker,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        drafted = [row for row, draft in enumerate(drafts) if draft.token_ids]
        plain = [row for row, draft in enumerate(drafts) if not draft.token_ids]
        self.batch_rows = [*drafted, *plain]  # of each request here, its row in the decode batch
        self.reqs = [decodes.reqs[row] for row in self.batch_rows]
        self.offered = [drafts[row] for row in self.batch_rows]
        self.drafts = [draft.token_ids for draft in self.offered]
        self._decodes, self._stop, self._vocab_size = decodes, stop, vocab_size
        self._begins = [0, *accumulate(1 + len(draft) for draft in self.drafts)]
        # numpy, as torch would share such small arrays out to threads that wait for the layers' operators
        lengths = np.array([1 + len(draft) for draft in self.drafts])
        rows_N = np.array(self.batch_rows).repeat(lengths)
        offsets = np.arange(self._begins[-1]) - np.array(self._begins[:-1]).repeat(lengths)
        inputs = decodes.inputs
        self.positions = torch.from_numpy(decodes.output_counts.numpy()[rows_N] + offsets)
        self.pool_indices = torch.from_numpy(inputs.pool_indices.numpy()[rows_N])
        self.input_positions = torch.from_numpy(inputs.positions.numpy()[rows_N] + offsets)
        rows = [row for req, draft in zip(self.reqs, self.drafts) for row in _sampling_rows(req, draft)]
        self.info = SamplingBatchInfo(rows, vocab_size, device)
        self._restrictions: list[list[Restriction]] = [[] for _ in self.reqs]  # by depth, where there are any
        self._first_plain = self._begins[len(drafted)]

    def restrict(self) -> None:
        """Write the tokens that restricted rows may sample, those at depth d after d drafted tokens.

        Each depth has a copy of the one before, so that the matcher of a kept token has done what plain decoding does.
        """
        members = [i for i, req in enumerate(self.reqs) if req.restriction is not None]
        numbers = {row: number for number, row in enumerate(self.info.restricted)}
        for depth in range(max((1 + len(self.drafts[i]) for i in members), default=0)):
            members = [i for i in members if depth <= len(self.drafts[i])]
            for i in members:
                self._restrictions[i].append(self._restriction(i, depth))
            sets_GW = np.empty((len(members), self.info.allowed_GW.shape[1]), dtype=np.int32)
            RestrictedRows([self._restrictions[i][depth] for i in members], sets_GW).write()
            self.info.allowed_GW[[numbers[self._begins[i] + depth] for i in members]] = sets_GW

    def _restriction(self, i: int, depth: int) -> Restriction:
        """Return the restriction of request `i` after `depth` drafted tokens."""
        if depth:
            place = self._restrictions[i][depth - 1].copy()
            place.feed(self.drafts[i][depth - 1 : depth])
            return place
        own = self.reqs[i].restriction
        assert own is not None
        own.follow(self.reqs[i].output_ids)
        return own

    def extends(self) -> list[ExtendInput]:
        """Return the inputs of the requests with drafts."""
        inputs = []
        for req, draft, row in zip(self.reqs, self.drafts, self.batch_rows):
            if draft:
                position = int(self._decodes.inputs.positions[row])
                tokens = [req.output_ids[-1], *draft]
                inputs.append(ExtendInput(tokens, req.pool_index, position, len(tokens)))
        return inputs

    def decode_input(self) -> DecodeInput:
        """Return the inputs of the requests without drafts."""
        rows, positions = self.pool_indices[self._first_plain :], self.input_positions[self._first_plain :]
        return DecodeInput(rows, positions, positions + 1, torch.arange(len(rows)))

    def plain_slots(self, slots_N: torch.Tensor) -> torch.Tensor:
        """Return the slots of the requests without drafts, of the slots of all rows."""
        return slots_N[self._first_plain :]

    def enter(self, tokens: SampledTokens, epoch: ServingEpoch) -> tuple[list[Req], list[int]]:
        """Append the kept tokens of all requests to their records, token by token, until a request ends.

        Returns the requests with news to send, and how many tokens each request of `reqs` got.
        """
        sampled = tokens.token_ids.tolist()
        lengths = [
            1 + _num_equal(draft, sampled[begin : begin + len(draft)])
            for draft, begin in zip(self.drafts, self._begins, strict=False)
        ]
        before = [len(req.output_ids) for req in self.reqs]
        news: dict[Req, None] = {}
        columns = _Columns(tokens, self.info)
        for depth in range(max(lengths)):
            members = [i for i, req in enumerate(self.reqs) if depth < lengths[i] and req.finished is None]
            if not members:
                break
            reqs = [self.reqs[i] for i in members]
            for i in members:
                own = self.reqs[i].restriction
                if depth and own is not None:
                    own.go_to(self._restrictions[i][depth])
            rows = SampledRows(reqs, self._stop, self._vocab_size, "cpu")
            last = [n for n, req in enumerate(reqs) if len(req.output_ids) + 1 >= req.sampling_params.max_new_tokens]
            part = columns.rows([self._begins[i] + depth for i in members])
            news |= dict.fromkeys(rows.enter(part, epoch, last, ()))
        return list(news), [len(req.output_ids) - count for req, count in zip(self.reqs, before)]

    def advance(self, counts: Sequence[int]) -> None:
        """Let the decode batch count what its requests got: requests that joined it since the launch got nothing."""
        counts_B = np.zeros(len(self._decodes), dtype=np.int64)
        counts_B[self.batch_rows] = counts
        self._decodes.advance_by(counts_B)

    def kept_rows(self, counts: Sequence[int]) -> np.ndarray:
        """Return the rows [n] whose input tokens stay in their sequences, when requests got `counts` tokens."""
        return np.concatenate([np.arange(begin, begin + count) for begin, count in zip(self._begins, counts)])

    def dropped_rows(self, counts: Sequence[int]) -> np.ndarray:
        """Return the other rows."""
        dropped = np.ones(self._begins[-1], dtype=np.bool_)
        dropped[self.kept_rows(counts)] = False
        return np.flatnonzero(dropped)


class Verified(NamedTuple):
    """A launched step's rows: `slots` [N] of their input tokens, on the host, and what was sampled."""

    rows: VerifiedRows
    slots: torch.Tensor
    tokens: SampledTokens

    def finish(self, epoch: ServingEpoch, cache: CacheManager) -> tuple[list[Req], list[int]]:
        """Enter the kept tokens, and give back the slots of the rest.

        Returns the requests with something to send, and how many tokens each request of the rows got.
        """
        rows = self.rows
        news, counts = rows.enter(self.tokens, epoch)
        cache.give_back(torch.from_numpy(self.slots.numpy()[rows.dropped_rows(counts)]))
        for req, draft, count in zip(rows.reqs, rows.drafts, counts):
            if draft:
                cache.settle_draft(req, count)
        rows.advance(counts)
        newest = cache.pool.newest_tokens
        last = torch.tensor([[req.pool_index, req.output_ids[-1]] for req in rows.reqs]).T
        newest.put(*to_device(last, newest.device).unbind())
        return news, counts


class Observed(NamedTuple):
    """A step whose routes the observers get once it is known which tokens stay; tokens of prompts come first."""

    batch: ForwardBatch
    ids_TLK: torch.Tensor
    num_prompt_tokens: int

    def kept(
        self, rows: VerifiedRows | None, counts: Sequence[int], ranks: Communicator
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """Return the step of the tokens that stay, with their routes; the DP ranks call this for the same steps."""
        batch, ids_TLK = self.batch, self.ids_TLK
        if rows is not None:
            first = self.num_prompt_tokens
            rows_kept = np.concatenate([np.arange(first), first + rows.kept_rows(counts)])
            kept = to_device(torch.from_numpy(rows_kept), ids_TLK.device)
            ids_TLK = ids_TLK[kept]
            batch = replace(batch, input_ids=batch.input_ids[kept], positions=batch.positions[kept])
        if batch.global_num_tokens is not None:
            told = ranks.gather_ints([ids_TLK.shape[0]])
            batch = replace(batch, global_num_tokens=[count for (count,) in told])
        return batch, ids_TLK


class _Columns:
    """The sampled tokens of all rows, of which single rows can be taken."""

    def __init__(self, tokens: SampledTokens, info: SamplingBatchInfo) -> None:
        self._tokens = tokens
        chosen = np.array([len(row.chosen_ids) for row in info.rows], dtype=np.int64)
        self._chosen = chosen.cumsum() - chosen, chosen
        self._kept = tokens.kept_begins().numpy(), tokens.kept_counts.numpy()

    def rows(self, rows: list[int]) -> SampledTokens:
        """Return the tokens of `rows`."""
        tokens = self._tokens
        chosen = _spans(*self._chosen, rows)
        if tokens.kept_ids.dim() == 2:  # a row each: its ids may be fewer than its count, which is over the limit then
            kept_ids, kept_logprobs = _taken(tokens.kept_ids, rows), _taken(tokens.kept_logprobs, rows)
        else:
            kept = _spans(*self._kept, rows)
            kept_ids, kept_logprobs = _taken(tokens.kept_ids, kept), _taken(tokens.kept_logprobs, kept)
        return SampledTokens(
            _taken(tokens.token_ids, rows),
            _taken(tokens.logprobs, rows),
            _taken(tokens.top_ids, rows),
            _taken(tokens.top_logprobs, rows),
            _taken(tokens.chosen_logprobs, chosen),
            _taken(tokens.kept_counts, rows),
            kept_ids,
            kept_logprobs,
        )


def _taken(values: torch.Tensor, rows: list[int] | np.ndarray) -> torch.Tensor:
    """Return the entries of `rows` of a tensor on the host, by numpy: see `VerifiedRows`."""
    return torch.from_numpy(values.numpy()[rows])


def _spans(begins: np.ndarray, counts: np.ndarray, rows: list[int]) -> np.ndarray:
    """Return the indices of the entries of `rows`, one row after the other."""
    if not counts[rows].any():
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(begins[row], begins[row] + counts[row]) for row in rows])


def _sampling_rows(req: Req, draft: Sequence[int]) -> list[SamplingRow]:
    """Return the sampler's rows of a request: the same, but for the tokens before, where penalties read them."""
    row = req.sampling_row
    if not row.has_penalties:
        return [row] * (1 + len(draft))
    rows = [row]
    for depth in range(1, 1 + len(draft)):
        later = replace(row, output_ids=[*row.output_ids, *draft[:depth]])
        later.shared = row.shared
        rows.append(later)
    return rows


def _num_equal(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many of the first tokens are equal."""
    count = 0
    for drafted, token_id in zip(draft, sampled):
        if drafted != token_id:
            break
        count += 1
    return count
