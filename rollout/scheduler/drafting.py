"""`Drafting`: the drafts of a step, and what became of them.

It asks the drafter for the requests of the decode batch, and `DraftChoice` for how many of the proposed tokens the step
verifies.  A proposal ends before the first id outside the vocabulary or that the request's restriction forbids, and
leaves room for the token that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from rollout.core.messages.req_output import DraftTally
from rollout.drafts.base import NO_DRAFT, Draft, Drafter
from rollout.drafts.costs import DraftChoice, Kept
from rollout.memory.cache_manager import CacheManager
from rollout.scheduler.policy import StepPlan
from rollout.scheduler.req import Req
from rollout.scheduler.stats import DraftCounts
from rollout.scheduler.verify import VerifiedRows

_LONGEST_WAIT = 16  # steps from one ask to the next, where there was no draft
_WAIT_FOR_BETTER = 4  # the same where verifying the drafts would not have paid


@dataclass(slots=True)
class _State:
    """State of a request's drafts.  `is_drafted`: the drafter is asked for it."""

    is_drafted: bool
    kept: Kept = field(default_factory=Kept)


class Drafting:
    """Owned by the scheduler.  On several ranks each rank that shares the requests has one, and all decide the same."""

    needs_hidden = False  # True: `see` is called in every step

    def __init__(
        self,
        drafter: Drafter | None,
        choice: DraftChoice | None,
        vocab_size: int,
        most: int,
        step_tokens: int = 1 << 31,
    ) -> None:
        """Verify at most `most` drafted tokens of a request in a step; without a `choice`, all that is proposed.

        `step_tokens`: the most tokens of prompts and drafts together in a step, for which it has memory.  `drafter`
        None: a subclass proposes.
        """
        self.counts = DraftCounts()
        self._drafter = drafter
        self._choice = choice
        self._vocab_size = vocab_size
        self._most = most
        self._step_tokens = step_tokens
        self._states: dict[Req, _State] = {}
        self._wait = 1  # steps from one ask to the next
        self._rests = 0  # steps until the next ask
        self._last: tuple[tuple[StepPlan, int], float] | None = None  # the last step, its requests, and its time

    def fill(self, plan: StepPlan, cache: CacheManager, now: float) -> None:
        """Give the plan's decode batch its drafts, for which `cache` has room.  All its tokens are known.

        `now`: the time of this turn, the same on all ranks.
        """
        self._note_step(now)
        reqs = plan.decodes.reqs
        if not reqs:
            self._wait, self._rests = 1, 0  # what the last requests gave tells nothing of the next
            return
        self._last = (plan, len(reqs)), now
        if self._rests > 0:
            self._rests -= 1
            return
        offered = self._offered(reqs)
        if not offered:
            self._rest_for(_LONGEST_WAIT)
            return
        lengths = [len(draft.token_ids) for _, _, draft in offered]
        counts = self._counts(plan, cache, [(draft.evidence, state) for _, state, draft in offered], lengths)
        drafts = [NO_DRAFT] * len(reqs)
        for (row, _, draft), chosen in zip(offered, counts, strict=True):
            count = cache.reserve_draft(reqs[row], chosen)
            drafts[row] = Draft(draft.token_ids[:count], draft.evidence)
        if any(draft.token_ids for draft in drafts):
            plan.drafts, self._wait = drafts, 1
        else:
            self._rest_for(_WAIT_FOR_BETTER)

    def _rest_for(self, most: int) -> None:
        """Ask again after twice as many steps as before, at most `most`; without a choice, in the next."""
        if self._choice is not None:
            self._wait = min(2 * self._wait, most)
            self._rests = self._wait - 1

    def _counts(
        self, plan: StepPlan, cache: CacheManager, offers: Sequence[tuple[int, _State]], lengths: list[int]
    ) -> list[int]:
        """Return how many tokens of each draft the step verifies.

        `offers`: the evidence and the request's state of each draft, of which `lengths` are the tokens.
        """
        num_requests = len(plan.decodes)
        counts = lengths
        if self._choice is not None:
            rates = [self._choice.kept_rate(evidence, state.kept) for evidence, state in offers]
            counts = self._choice.choose(rates, lengths, num_requests)
        room = min(cache.num_available - num_requests, self._step_tokens - plan.num_tokens)
        while sum(counts) > max(room, 0):
            counts[counts.index(max(counts))] -= 1
        return counts

    def see(self, spans: Sequence[tuple[Req, int, int]], hidden_TD: torch.Tensor) -> None:
        """Take in the final hidden states of a launched step.

        `spans`: its requests, each with the first position and the number of its tokens, in the order of the rows.
        """
        raise NotImplementedError

    def rest(self) -> None:
        """Note that no step follows the last one at once, so that its time is not known."""
        self._last = None

    def _note_step(self, now: float) -> None:
        """Take in the time of the last step, if it had no prompts."""
        if self._last is not None and self._choice is not None:
            (plan, num_requests), then = self._last
            if not plan.extends:
                self._choice.note_step(num_requests, plan.num_drafted, now - then)
        self._last = None

    def note(self, rows: VerifiedRows, counts: Sequence[int]) -> None:
        """Take in how many tokens each request of `rows` got in a step, of which one was not drafted."""
        for req, draft, count in zip(rows.reqs, rows.offered, counts, strict=True):
            if not draft.token_ids:
                continue
            drafted, kept = len(draft.token_ids), max(count - 1, 0)
            self.counts.note(drafted, kept)
            own = req.output.drafts = req.output.drafts or DraftTally()
            own.note(drafted, kept)
            if self._choice is not None:
                own_kept = self._states[req].kept
                self._choice.note_draft(draft.evidence, own_kept, kept, min(kept + 1, drafted))

    def forget(self, req: Req) -> None:
        """Drop what is kept of a request that has ended."""
        self._states.pop(req, None)
        if self._drafter is not None:
            self._drafter.forget(req)

    def flush(self) -> None:
        """Forget the KV of drafts, as that of the served model is flushed.  No request has any."""

    def _offered(self, reqs: Sequence[Req]) -> list[tuple[int, _State, Draft]]:
        """Return the drafts that have tokens, each with the row and the state of its request."""
        asked = [(row, state) for row, req in enumerate(reqs) if (state := self._state_of(req)).is_drafted]
        assert self._drafter is not None
        asks = [(reqs[row], self._longest_draft(reqs[row])) for row, _ in asked]
        drafts = self._drafter.propose(asks) if asks else []
        each = zip(asked, drafts, strict=True)
        offered = [(row, state, self._fitting(reqs[row], draft)) for (row, state), draft in each if draft.token_ids]
        return [(row, state, draft) for row, state, draft in offered if draft.token_ids]

    def _state_of(self, req: Req) -> _State:
        state = self._states.get(req)
        if state is None:
            state = self._states[req] = _State(is_drafted=req.source.replay is None)  # else the tokens are given
        return state

    def _longest_draft(self, req: Req) -> int:
        """Return the most tokens that a draft of a request may have: one more follows it."""
        return min(self._most, req.sampling_params.max_new_tokens - len(req.output_ids) - 1)

    def _fitting(self, req: Req, draft: Draft) -> Draft:
        """Return the draft before the first id outside the vocabulary, or that the request's restriction forbids."""
        token_ids = list(takewhile(lambda token_id: 0 <= token_id < self._vocab_size, draft.token_ids))
        if req.restriction is not None and token_ids:
            req.restriction.follow(req.output_ids)
            token_ids = token_ids[: req.restriction.num_fitting(token_ids)]
        return draft if len(token_ids) == len(draft.token_ids) else Draft(token_ids, draft.evidence)
