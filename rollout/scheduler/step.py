"""A step in two halves: `launch` gives it to the device, `finish` enters its results into the records.

    plan -- launch --> InFlight -- finish --> records
                          |
              the next launch may come first: its input tokens are on the device, its lengths are counted

`launch` reads no sampled token and does not wait for the device, but where a row has a restriction; its last act is to
start copies of the results to the host.  `finish` waits only for these copies.  The result of `launch` names the epoch
that computes the step.  So tokens, scores and rows are labelled with the weights that made them, even if others are
published before the finish.

Shapes: T tokens of the step, D hidden, N rows that sample, V vocabulary, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rollout.core.forward_batch import ForwardBatch, StepKind
from rollout.core.host_copy import to_device
from rollout.core.messages.req_output import FinishReason
from rollout.executor.input_builder import ExtendInput, build_forward_batch
from rollout.executor.model_runner import ModelRunner, StepRoutes
from rollout.memory.cache_manager import CacheManager
from rollout.model.adapters import slots_of_tokens
from rollout.model.model_state import ServingEpoch
from rollout.sampling.base import Sampler, ScoredTokens
from rollout.sampling.row_lists import RowLists
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.drafting import Drafting
from rollout.scheduler.hidden_rows import HiddenPart, HiddenRows, enter_hidden
from rollout.scheduler.in_flight import InFlight, RankCounts, Sampled
from rollout.scheduler.policy import StepPlan
from rollout.scheduler.pooling import take_all_rows
from rollout.scheduler.records import SampledRows, enter_scores
from rollout.scheduler.req import Extend, Req
from rollout.scheduler.stats import DraftCounts
from rollout.scheduler.step_spans import forced_routes, spans_of
from rollout.scheduler.stop import StopChecker
from rollout.scheduler.verify import Observed, Verified, VerifiedRows


class StepRunner:
    """Runs both halves of a step.  Steps are finished in the order in which they were launched.

    A request may turn out to have ended after the next step was launched with it.  Then that step's results for it are
    dropped: `num_ended` counts ends, so that a step knows whether there were any since its launch.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        cache: CacheManager,
        stop: StopChecker,
        vocab_size: int,
        new_lists: Callable[[], RowLists],
        drafting: Drafting | None = None,
    ) -> None:
        """Take the parts that a step needs.  `new_lists()` makes room for the lists of all requests that may run.

        `drafting` None: no step verifies.  Else the observers of routes get a step when it is finished.
        """
        self._runner = runner
        self._sampler = sampler
        self._cache = cache
        self._stop = stop
        self._vocab_size = vocab_size
        self._num_ended = 0
        self._drafting = drafting
        self.drafts = drafting is not None  # True: a step is planned once all tokens are known
        runner.observes_later = drafting is not None
        self._new_lists = new_lists
        self._lists = new_lists()
        self._decoding: SampledRows | None = None  # of generation `_generation` of the decode batch
        self._generation = -1
        self._decode_adapters: tuple[int, torch.Tensor | None] = (-1, None)  # of that generation's requests
        self._unfinished: InFlight | None = None  # the step that was launched last
        model = runner.state.model
        answers = model.parallel.position.is_dp_leader
        self._hidden = HiddenRows(model.config.num_hidden_layers, answers=answers)
        self._replaying = (-1, False)  # generation of the decode batch, and whether one of its requests replays routes

    @property
    def draft_counts(self) -> DraftCounts:
        """Counts of all drafts so far: a live object, all 0 if no step verifies drafts."""
        return DraftCounts() if self._drafting is None else self._drafting.counts

    def add_drafts(self, plan: StepPlan, now: float) -> None:
        """Give the plan drafts.  `now`: the time of this turn, the same on all ranks."""
        assert self._drafting is not None
        self._drafting.fill(plan, self._cache, now)

    def forget(self, req: Req) -> None:
        """Drop what drafts were made of, of a request that has ended."""
        if self._drafting is not None:
            self._drafting.forget(req)

    def rest(self) -> None:
        """Drop all data of the requests that were sampled last.  Called if no step follows for now."""
        self._decoding = None
        if self._drafting is not None:
            self._drafting.rest()
        if self._lists.is_used:
            self._lists = self._new_lists()

    # --- first half -----------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan, counts: RankCounts | None, phase: Callable[[str], None]) -> InFlight:
        """Enqueue the step on the device.  `phase(name)` is called when a part of a phase of `StepStats` has ended."""
        step = self._enqueue(plan, counts, phase)
        pool = self._cache.pool
        self._unfinished = step.brought(pool.device) if pool.is_apart else step
        return self._unfinished

    def _enqueue(self, plan: StepPlan, counts: RankCounts | None, phase: Callable[[str], None]) -> InFlight:
        extends, decodes, pool = plan.extends, plan.decodes, self._cache.pool
        epoch = self._runner.state.epoch
        verified = self._verified_rows(plan) if plan.drafts else None
        batch, slots = self._build(plan, epoch, verified)
        if counts is not None:
            batch.global_num_tokens, batch.kind_everywhere = counts
        elif verified is not None:
            batch.kind_everywhere = self.kind_of(plan)
        phase("build")
        hidden: Sequence[HiddenPart] = ()
        if wanted := self._hidden.wanted(plan):
            hidden_TD, routes, hidden = self._forward_keeping(wanted, plan, verified, batch)
        else:
            hidden_TD, routes = self._runner.forward(batch)
        if self._drafting is not None and self._drafting.needs_hidden:
            self._drafting.see(list(spans_of(plan, verified)), hidden_TD)
        observed = None
        if routes is not None and self._runner.observes_later:
            observed = Observed(batch, routes.rows_TLK, sum(item.count for item in extends))
        if plan.is_empty:  # another rank's tokens needed this one's experts
            return InFlight(epoch, self._num_ended, routes, observed=observed, is_idle=True)
        rows = self._rows_of(decodes) if decodes and verified is None else None
        tokens = None
        if verified is not None and not extends:
            tokens = self._runner.sample_replayed(verified.info, verified.positions)
        elif rows is not None and not extends:
            tokens = self._runner.sample_replayed(rows.info, decodes.output_counts)
        if tokens is None:
            logits_NV = self._runner.logits(hidden_TD[batch.logits_rows] if extends or verified else hidden_TD)
        phase("forward")
        completed: list[Req] = []
        scored: list[tuple[Req, ScoredTokens]] = []
        pooled: list[tuple[Req, torch.Tensor]] = []
        sampled: list[Sampled] = []
        if extends:
            completed = [item.req for item in extends if item.completes]
            scored = self._score_prompts(extends, hidden_TD)
            pooled = take_all_rows(extends, hidden_TD, self._runner.state.model, epoch)
            for item in extends:
                item.req.device_len += item.count
            logits_NV = self._sample_first(completed, logits_NV, sampled)
        drafted: Verified | None = None
        if verified is not None:
            if tokens is None:
                verified.restrict()
                tokens = self._sampler.sample(logits_NV, verified.info, verified.positions)
            drafted = Verified(verified, slots, tokens)
        elif rows is not None:
            if tokens is None:
                if rows.info.restricted:
                    self._restrict(rows)
                tokens = self._sampler.sample(logits_NV, rows.info, decodes.output_counts)
            pool.newest_tokens.put(batch.decode.req_pool_indices, tokens.token_ids)
            sampled.append(Sampled(rows, tokens, decodes.advance()))
        ending = [part.rows.reqs[row] for part in sampled for row in part.last]
        ending += [req for req in completed if not req.samples]
        parts = (completed, ending, sampled, scored, pooled, hidden, drafted, observed)
        return InFlight(epoch, self._num_ended, routes, *parts)

    def _forward_keeping(
        self, wanted: frozenset[int], plan: StepPlan, verified: VerifiedRows | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, StepRoutes | None, Sequence[HiddenPart]]:
        """Run the model.  Returns its hidden states, its routes, and the rows of `wanted` states that requests want."""
        kept = self._hidden.between(wanted)
        runner = self._runner
        hidden_TD, routes = runner.forward(batch) if kept is None else runner.forward_keeping(batch, kept)
        return hidden_TD, routes, self._hidden.take(plan, verified, hidden_TD, kept)

    def _verified_rows(self, plan: StepPlan) -> VerifiedRows:
        device = self._cache.pool.newest_tokens.device
        return VerifiedRows(plan.decodes, plan.drafts, self._stop, self._vocab_size, device)

    def _build(
        self, plan: StepPlan, epoch: ServingEpoch, verified: VerifiedRows | None
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """Build the step's batch.  Its tokens get slots, noted as written under `epoch`.

        Returns it with the slots, on the host, of the tokens of its decode batch.
        """
        extends, decodes, cache = plan.extends, plan.decodes, self._cache
        inputs, stamp = decodes.inputs, self._runner.kv_pool.stamp
        drafts: list[ExtendInput] = []
        if verified is None:
            slots = plain_slots = cache.extend_each(decodes.generation, inputs.pool_indices, inputs.positions)
        else:
            place = cache.slots_at if plan.is_placed else cache.extend_apart
            slots = place(verified.pool_indices, verified.input_positions)
            drafts, inputs, plain_slots = verified.extends(), verified.decode_input(), verified.plain_slots(slots)
        stamp(slots, epoch.weight_epoch)
        for item in extends:
            stamp(cache.slots(item.req, item.start, item.start + item.count), epoch.weight_epoch)
        items = [_input(item) for item in extends] if extends else []
        batch = build_forward_batch(items + drafts, inputs, plain_slots, cache.pool)
        if cache.states is not None:
            ordered = decodes.reqs if verified is None else verified.reqs
            drafted = list(ordered[: len(drafts)])
            cache.states.prepare(
                batch, [*(item.req for item in extends), *drafted], ordered[len(drafts) :], len(drafts)
            )
        is_known = self._decode_adapters[0] == decodes.generation and not plan.extends and verified is None
        batch.adapters = self._decode_adapters[1] if is_known else self._adapters_of(plan, verified)
        if self._replays(plan):
            batch.forced_routes = forced_routes(plan, verified, cache.pool.device)
        return batch, slots

    def _adapters_of(self, plan: StepPlan, verified: VerifiedRows | None) -> torch.Tensor | None:
        """Return the adapter slot of each token of the step [T]; None if no request of it has an adapter."""
        if verified is not None:
            spans = spans_of(plan, verified)
            return self._on_device(slots_of_tokens([(req.adapter_slot, count) for req, _, count in spans]))
        decodes = plan.decodes
        if self._decode_adapters[0] != decodes.generation:
            rows = self._on_device(slots_of_tokens([(req.adapter_slot, 1) for req in decodes.reqs]))
            self._decode_adapters = (decodes.generation, rows)
        of_decodes = self._decode_adapters[1]
        if not plan.extends:
            return of_decodes
        of_extends = self._on_device(slots_of_tokens([(item.req.adapter_slot, item.count) for item in plan.extends]))
        if of_decodes is None and of_extends is None:
            return None
        device = self._cache.pool.device
        if of_extends is None:
            of_extends = torch.full((sum(item.count for item in plan.extends),), -1, device=device)
        if of_decodes is None:
            of_decodes = torch.full((len(decodes),), -1, device=device)
        return torch.cat([of_extends, of_decodes])

    def _on_device(self, slots_T: torch.Tensor | None) -> torch.Tensor | None:
        return None if slots_T is None else to_device(slots_T, self._cache.pool.device)

    def _sample_first(self, completed: Sequence[Req], logits_NV: torch.Tensor, sampled: list[Sampled]) -> torch.Tensor:
        """Sample a token for each request whose prompt is complete, from the first rows.  Returns the other rows."""
        reqs = [req for req in completed if req.samples]
        if reqs:
            newest = self._cache.pool.newest_tokens
            rows = SampledRows(reqs, self._stop, self._vocab_size, newest.device, self._lists)
            counts = [len(req.output_ids) for req in reqs]  # none of their tokens is in flight
            if rows.info.restricted:
                self._restrict(rows)
            tokens = self._sampler.sample(logits_NV[: len(reqs)], rows.info, torch.tensor(counts))
            newest.put(to_device(torch.tensor([req.pool_index for req in reqs]), newest.device), tokens.token_ids)
            last = [row for row, req in enumerate(reqs) if counts[row] + 1 >= req.sampling_params.max_new_tokens]
            sampled.append(Sampled(rows, tokens, last))
        return logits_NV[len(reqs) :]

    def _restrict(self, rows: SampledRows) -> None:
        """Write the tokens that restricted rows may sample, while the device computes the forward.

        They follow from the tokens before, so the host waits for the step before, whose results are on their way.
        """
        before = self._unfinished
        if before is not None:
            self._wait(before)
            for part in before.sampled:
                for req, token_id in zip(part.rows.reqs, part.tokens.token_ids.tolist()):
                    restriction = req.restriction
                    if restriction is not None and req.finished is None:
                        restriction.follow(req.output_ids)
                        if restriction.num_fed == len(req.output_ids):
                            restriction.feed([token_id])
        rows.restrict()

    def kind_of(self, plan: StepPlan) -> StepKind:
        """Return the kind of this rank's step."""
        if self._replays(plan) or self._hidden.between(self._hidden.wanted(plan)) is not None:
            return StepKind.IN_PYTHON
        if plan.extends or (plan.drafts and not self._runner.takes_verify(plan.num_tokens, plan.num_read_again)):
            return StepKind.PROMPTS
        return StepKind.DECODE

    def _replays(self, plan: StepPlan) -> bool:
        """Return whether a request of the step has routes to replay."""
        decodes = plan.decodes
        if self._replaying[0] != decodes.generation:
            self._replaying = (decodes.generation, any(req.source.replay is not None for req in decodes.reqs))
        return self._replaying[1] or any(item.req.source.replay is not None for item in plan.extends)

    def _rows_of(self, decodes: DecodeBatch) -> SampledRows:
        """Return the rows of the decode batch; they are the last step's if the same requests decode now."""
        if self._decoding is None or self._generation != decodes.generation:
            device = self._cache.pool.newest_tokens.device
            self._decoding = SampledRows(decodes.reqs, self._stop, self._vocab_size, device, self._lists)
            self._generation = decodes.generation
        return self._decoding

    def _score_prompts(self, extends: Sequence[Extend], hidden_TD: torch.Tensor) -> list[tuple[Req, ScoredTokens]]:
        """Return the log-probabilities of prompt tokens under the raw distribution at temperature.

        They come from the rows that predict the tokens.  Row r of an extend is position `start + r` and predicts token
        `start + r + 1`.
        """
        scored, offset = [], 0
        for item in extends:
            record = item.req.prompt_record
            if record is not None:
                first = max(item.start, record.next_position)
                last = min(item.start + item.count, item.req.prompt_len - 1)  # exclusive
                if first < last:
                    rows = hidden_TD[offset + first - item.start : offset + last - item.start]
                    scored += self._score_rows(item.req, rows, first + 1)
            offset += item.count
        return scored

    def _score_rows(self, req: Req, hidden_ND: torch.Tensor, position: int) -> list[tuple[Req, ScoredTokens]]:
        """Score the prompt tokens from `position` on, one for each row."""
        scored, source = [], req.source
        temperature = req.sampling_params.effective_temperature
        for logits_NV in self._runner.logits_in_chunks(hidden_ND):
            targets = to_device(
                torch.tensor(req.prompt.ids[position : position + len(logits_NV)]), self._cache.pool.device
            )
            chosen_ids, top_n = source.token_ids_logprob or [], source.top_logprobs_num
            scored.append((req, self._sampler.score(logits_NV, targets, temperature, chosen_ids, top_n)))
            position += len(logits_NV)
        return scored

    # --- second half ----------------------------------------------------------------------------------------------

    def finish(self, step: InFlight, phase: Callable[[str], None]) -> tuple[list[Req], int]:
        """Enter a step into the records, and set `req.finished` of requests that end with it.

        Returns the requests with something to send, as they ended or stream, and the number of entered tokens.
        """
        if step is self._unfinished:
            self._unfinished = None
        if step.copies is not None:
            self._wait(step)
            phase("forward")
        if step.routes is not None:
            self._runner.keep_routes(step.routes)
        for req, scored in step.scored:
            enter_scores(req, scored, step.epoch)
        for req, rows_NC in step.pooled:
            assert req.output.pool is not None
            req.output.pool.rows.append(rows_NC.cpu().numpy())
        outgoing: list[Req] = []
        for req in step.completed:
            if not req.samples:
                req.output.versions.note(step.epoch, 0)
                req.finished = FinishReason(type="length", length=0)
                outgoing.append(req)
        num_entered = 0
        ended: Sequence[int] = ()
        for rows, tokens, last in step.sampled:
            if step.num_ended != self._num_ended:
                ended = [row for row, req in enumerate(rows.reqs) if req.finished]
            outgoing += rows.enter(tokens, step.epoch, last, ended)
            num_entered += len(rows.reqs) - len(ended)
        counts: Sequence[int] = ()
        if step.verified is not None:
            news, counts = step.verified.finish(step.epoch, self._cache)
            assert self._drafting is not None
            self._drafting.note(step.verified.rows, counts)
            outgoing += news
            num_entered += sum(counts)
        if step.hidden:
            enter_hidden(step.hidden, step.epoch)
        if step.observed is not None:
            verified_rows = None if step.verified is None else step.verified.rows
            kept = step.observed.kept(verified_rows, counts, self._runner.state.model.parallel.attn_dp)
            self._runner.observe(step.epoch, *kept)
        if outgoing:
            self._num_ended += sum(req.finished is not None for req in outgoing)
        return outgoing, num_entered

    def _wait(self, step: InFlight) -> None:
        """Wait until the results of a step are on the host."""
        if step.copies is not None:
            step.copies.wait(self._runner.state.model.parallel.wait_for)


def _input(item: Extend) -> ExtendInput:
    req = item.req
    token_ids = req.tokens(item.start, item.start + item.count)
    return ExtendInput(token_ids, req.pool_index, item.start, int(item.completes and req.samples))
