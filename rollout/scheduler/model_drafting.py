"""`ModelDrafting`: the drafts of a step by a model.

    fill    policy: how deep -> slots for the rows of the step -> the draft catches up with known tokens -> proposes

A draft costs forwards, so the policy decides first.  A request's first draft computes its prompt: at most as many
tokens a step as a step may have.  A request that is not yet caught up gets no draft.

`ProposalSampler` picks the tokens of a draft.  Groups of ranks that have requests of their own draft each as deep as
they choose, or not at all.  Where the draft has experts, they run its forwards together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rollout.core.sampling_params import SamplingParams
from rollout.drafts.base import NO_DRAFT, Draft
from rollout.drafts.costs import DraftChoice
from rollout.executor.draft_runner import DraftRunner, DraftSpan, Pick
from rollout.grammar.restriction import Restriction
from rollout.memory.cache_manager import CacheManager
from rollout.sampling.base import Sampler
from rollout.sampling.batch_info import SamplingRow
from rollout.scheduler.drafting import Drafting
from rollout.scheduler.policy import StepPlan
from rollout.scheduler.proposal_sampler import ProposalSampler
from rollout.scheduler.req import Req
from rollout.scheduler.verify import VerifiedRows


@dataclass(slots=True)
class _Reach:
    """State of a request in the draft: the KV of its first `length` tokens is there, until it is retracted.

    `row`: its sampling parameters, without the ones that follow each token.
    """

    length: int
    num_retractions: int
    row: SamplingRow


class _Kept(NamedTuple):
    """The hidden states [n, D] of a request in the last step, at the positions `start ..`: it keeps the first ones."""

    start: int
    hidden_ND: torch.Tensor
    num_retractions: int


@dataclass(slots=True)
class _Work:
    """A span that the draft computes, and the number of tokens that it proposes then.

    `row`: of the request in the decode batch; None: it proposes nothing.
    """

    span: DraftSpan
    count: int = 0
    row: int | None = None


class ModelDrafting(Drafting):
    """Drafts by `runner`; `sampler` is the served one.  See `Drafting` for the rest."""

    def __init__(
        self,
        runner: DraftRunner,
        sampler: Sampler,
        choice: DraftChoice | None,
        vocab_size: int,
        most: int,
        step_tokens: int = 1 << 31,
    ) -> None:
        super().__init__(None, choice, vocab_size, most, step_tokens)
        self.runner = runner
        self.needs_hidden = runner.model.needs_hidden
        self._sampler = sampler
        self._reaches: dict[Req, _Reach] = {}
        self._kept: dict[Req, _Kept] = {}  # of the last step, if the draft needs hidden states

    def see(self, spans: Sequence[tuple[Req, int, int]], hidden_TD: torch.Tensor) -> None:
        self._kept, first = {}, 0
        for req, start, count in spans:
            self._kept[req] = _Kept(start, hidden_TD[first : first + count], req.num_retractions)
            first += count

    def fill(self, plan: StepPlan, cache: CacheManager, now: float) -> None:
        self._note_step(now)
        reqs = plan.decodes.reqs
        work: list[_Work] = []
        if not plan.is_empty:  # else the step is other groups' alone, or there is none, as weights may be written
            work = self._work(reqs, self._chosen(plan, cache), cache)
            self._kept = {}
        if reqs and all(len(item.span.token_ids) <= 1 + self._most for item in work):
            self._last = (plan, len(reqs)), now  # else its time is also that of a prompt
        if not work and not self.runner.meets_groups:
            return
        work.sort(key=lambda item: -item.count)
        drafted = [item for item in work if item.count]
        if drafted:
            _place(plan, drafted, cache)
        counts = [item.count for item in work]
        pick = self._pick([reqs[item.row] for item in drafted if item.row is not None], cache.pool.device)
        proposed = self.runner.propose([item.span for item in work], counts, cache.pool, pick)
        if drafted:
            drafts = [NO_DRAFT] * len(reqs)
            for item, ids in zip(drafted, proposed):
                assert item.row is not None
                drafts[item.row] = Draft(ids)
            plan.drafts = drafts

    def note(self, rows: VerifiedRows, counts: Sequence[int]) -> None:
        super().note(rows, counts)
        for req, draft in zip(rows.reqs, rows.offered, strict=True):
            if draft.token_ids:
                reach = self._reaches[req]
                reach.length = min(reach.length, req.num_tokens - 1)

    def forget(self, req: Req) -> None:
        super().forget(req)
        self._reaches.pop(req, None)
        self._kept.pop(req, None)

    def flush(self) -> None:
        self._reaches.clear()
        self._kept = {}
        self.runner.forget()

    def _chosen(self, plan: StepPlan, cache: CacheManager) -> list[int]:
        """Return how many tokens of each request of the decode batch the draft should propose."""
        reqs = plan.decodes.reqs
        chosen = [0] * len(reqs)
        tried = [row for row, req in enumerate(reqs) if self._state_of(req).is_drafted]
        lengths = [max(self._longest_draft(reqs[row]), 0) for row in tried]
        if any(lengths):
            offers = [(0, self._states[reqs[row]]) for row in tried]
            for row, count in zip(tried, self._counts(plan, cache, offers, lengths), strict=True):
                chosen[row] = count
        return chosen

    def _work(self, reqs: Sequence[Req], chosen: Sequence[int], cache: CacheManager) -> list[_Work]:
        """Return what the draft computes in this step, in which requests get up to `chosen` tokens."""
        if self.needs_hidden:
            return self._work_of_hidden(reqs, chosen, cache)
        work, left = [], self._step_tokens
        for row, (req, wanted) in enumerate(zip(reqs, chosen, strict=True)):
            if not wanted or not left:
                continue
            reach = self._reach(req, cache)
            start, count = reach.length, min(req.num_tokens - reach.length, left)
            is_whole = start + count == req.num_tokens
            drafted = cache.reserve_draft(req, wanted) if is_whole else 0
            count -= is_whole and not drafted  # the newest token has no slot without a draft
            if count:
                left -= count
                span = DraftSpan(req.pool_index, start, req.tokens(start, start + count))
                work.append(_Work(span, drafted, row if drafted else None))
                reach.length = start + count + max(drafted - 1, 0)
                self.runner.note(cache.pool, req.pool_index, start, span.token_ids[: req.device_len - start])
        return work

    def _work_of_hidden(self, reqs: Sequence[Req], chosen: Sequence[int], cache: CacheManager) -> list[_Work]:
        """Return the spans of the last step's tokens: of prompts always, of other requests while some are drafted."""
        rows = {req: row for row, req in enumerate(reqs)}
        work = []
        for req, kept in self._kept.items():
            if req.pool_index == -1 or req.num_retractions != kept.num_retractions:
                continue
            row = rows.get(req)
            drafted = 0 if row is None or not chosen[row] else cache.reserve_draft(req, chosen[row])
            end = min(kept.start + len(kept.hidden_ND), req.num_tokens - 1)  # the token that follows is known
            if end > kept.start and (drafted or any(chosen) or kept.start < req.prompt_len):
                self._reach(req, cache)
                hidden_ND = kept.hidden_ND[: end - kept.start]
                span = DraftSpan(req.pool_index, kept.start, req.tokens(kept.start + 1, end + 1), hidden_ND)
                work.append(_Work(span, drafted, row if drafted else None))
        return work

    def _reach(self, req: Req, cache: CacheManager) -> _Reach:
        reach = self._reaches.get(req)
        if reach is None or reach.num_retractions != req.num_retractions:
            known = req.device_len
            length = self.runner.known_len(cache.slots(req, 0, known), req.token_array(0, known))
            reach = self._reaches[req] = _Reach(length, req.num_retractions, _row_of(req))
        return reach

    def _pick(self, reqs: Sequence[Req], device: torch.device) -> Pick:
        """Return the function that picks the tokens of `reqs`, which get proposals in this order."""
        rows = [self._reaches[req].row for req in reqs]
        positions_N = torch.tensor([len(req.output_ids) for req in reqs], dtype=torch.int64)
        places = [_place_of(req) for req in reqs]
        return ProposalSampler(self._sampler, rows, places, positions_N, self._vocab_size, device)


def _place(plan: StepPlan, drafted: Sequence[_Work], cache: CacheManager) -> None:
    """Take the KV slots of the step's decode batch and of its drafts."""
    inputs = plan.decodes.inputs
    lengths = np.ones(len(plan.decodes), dtype=np.int64)
    for item in drafted:
        assert item.row is not None
        lengths[item.row] += item.count
    offsets = np.arange(lengths.sum()) - (lengths.cumsum() - lengths).repeat(lengths)
    positions = torch.from_numpy(inputs.positions.numpy().repeat(lengths) + offsets)
    cache.extend_apart(torch.from_numpy(inputs.pool_indices.numpy().repeat(lengths)), positions)
    plan.is_placed = True


def _row_of(req: Req) -> SamplingRow:
    """Return the sampling parameters of a request that do not depend on its tokens."""
    params = req.sampling_params
    chosen = SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        logit_bias=params.logit_bias,
    )
    is_restricted = req.restriction is not None
    return SamplingRow(chosen, req.sampling_row.seed, (), (), [], wants_logprob=False, is_restricted=is_restricted)


def _place_of(req: Req) -> Restriction | None:
    """Return a copy of a request's restriction after all its tokens."""
    if req.restriction is None:
        return None
    req.restriction.follow(req.output_ids)
    return req.restriction.copy(for_proposals=True)
