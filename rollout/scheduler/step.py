"""A step in two halves: `launch` gives it to the device, `finish` enters its results into the records.

    plan -- launch --> InFlight -- finish --> records
                          |
              the next launch may come first: its input tokens are on the device, its lengths are counted

`launch` reads no sampled token and does not wait for the device, but where a row has a restriction; its last act is to
start copies of the results to the host.  `finish` waits only for these copies.  The result of `launch` names the epoch
that computes the step.  So tokens, scores and rows are labelled with the weights that made them, even if others are
published before the finish.

Shapes: T tokens of the step, D hidden, N rows that sample, V vocabulary, L MoE layers, K top-k, R rows of routes that a
request sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rollout.core.forward_batch import ForwardBatch, StepKind
from rollout.core.host_copy import HostCopies, to_device
from rollout.core.messages.req_output import FinishReason
from rollout.executor.input_builder import ExtendInput, build_forward_batch
from rollout.executor.model_runner import ModelRunner, StepRoutes
from rollout.memory.cache_manager import CacheManager
from rollout.model.adapters import slots_of_tokens
from rollout.model.model_state import ServingEpoch
from rollout.sampling.base import SampledTokens, Sampler, ScoredTokens
from rollout.sampling.row_lists import RowLists
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.policy import StepPlan
from rollout.scheduler.pooling import take_rows
from rollout.scheduler.records import SampledRows, enter_scores
from rollout.scheduler.req import Extend, Req
from rollout.scheduler.stop import StopChecker

_FREE = -1  # in a row of forced routes: the router chooses


class Sampled(NamedTuple):
    """A token for each of `rows`.  `last`: the numbers of the rows that get no further token."""

    rows: SampledRows
    tokens: SampledTokens
    last: Sequence[int]


class RankCounts(NamedTuple):
    """The tokens of each attention-DP rank in a step, and the least kind of step that any of them has.

    Ranks replay a captured step together or not at all, so each of them knows both.
    """

    tokens: list[int]
    kind: StepKind


class InFlight(NamedTuple):
    """A launched step.  Its tensors are its own and nothing changes them; after `copies.wait()` they are on the host.

    `completed`: requests whose known tokens all have their KV after this step.  `ending`: requests that have all their
    tokens after it, so that no step follows.  `num_ended`: see `StepRunner`.  `is_idle`: it has no tokens of this rank.
    """

    epoch: ServingEpoch
    num_ended: int
    routes: StepRoutes | None
    completed: Sequence[Req] = ()
    ending: Sequence[Req] = ()
    sampled: Sequence[Sampled] = ()
    scored: Sequence[tuple[Req, ScoredTokens]] = ()
    pooled: Sequence[tuple[Req, torch.Tensor]] = ()
    is_idle: bool = False
    copies: HostCopies | None = None  # None: computed on the host

    @property
    def sampling(self) -> list[Req]:
        return [req for part in self.sampled for req in part.rows.reqs]

    def brought(self, device: torch.device) -> InFlight:
        """Return the step with its results on their way from `device` to the host."""
        copies = HostCopies(device)
        step = self._replace(
            routes=None if self.routes is None else StepRoutes(*map(copies.copy, self.routes)),
            sampled=[part._replace(tokens=copies.copy_all(part.tokens)) for part in self.sampled],
            scored=[(req, copies.copy_all(scored)) for req, scored in self.scored],
            pooled=[(req, copies.copy(rows)) for req, rows in self.pooled],
            copies=copies,
        )
        copies.close()
        return step


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
    ) -> None:
        """Take the parts that a step needs.  `new_lists()` makes room for the lists of all requests that may run."""
        self._runner = runner
        self._sampler = sampler
        self._cache = cache
        self._stop = stop
        self._vocab_size = vocab_size
        self._num_ended = 0
        self._new_lists = new_lists
        self._lists = new_lists()
        self._decoding: SampledRows | None = None  # of generation `_generation` of the decode batch
        self._generation = -1
        self._decode_adapters: tuple[int, torch.Tensor | None] = (-1, None)  # of that generation's requests
        self._unfinished: InFlight | None = None  # the step that was launched last
        self._replaying = (-1, False)  # generation of the decode batch, and whether one of its requests replays routes

    def rest(self) -> None:
        """Drop all data of the requests that were sampled last.  Called if no step follows for now."""
        self._decoding = None
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
        batch = self._build(plan, epoch)
        if counts is not None:
            batch.global_num_tokens, batch.kind_everywhere = counts
        phase("build")
        hidden_TD, routes = self._runner.forward(batch)
        if plan.is_empty:  # another rank's tokens needed this one's experts
            return InFlight(epoch, self._num_ended, routes, is_idle=True)
        tokens = None
        if decodes and not extends:
            tokens = self._runner.sample_replayed(self._rows_of(decodes).info, decodes.output_counts)
        if tokens is None:
            logits_NV = self._runner.logits(hidden_TD[batch.logits_rows] if extends else hidden_TD)
        phase("forward")
        completed: list[Req] = []
        scored: list[tuple[Req, ScoredTokens]] = []
        pooled: list[tuple[Req, torch.Tensor]] = []
        sampled: list[Sampled] = []
        if extends:
            completed = [item.req for item in extends if item.completes]
            scored = self._score_prompts(extends, hidden_TD)
            pooled = self._pool_prompts(extends, hidden_TD, epoch)
            for item in extends:
                item.req.device_len += item.count
            logits_NV = self._sample_first(completed, logits_NV, sampled)
        if decodes:
            rows = self._rows_of(decodes)
            if tokens is None:
                self._restrict(rows)
                tokens = self._sampler.sample(logits_NV, rows.info, decodes.output_counts)
            pool.newest_tokens.put(batch.decode.req_pool_indices, tokens.token_ids)
            sampled.append(Sampled(rows, tokens, decodes.advance()))
        ending = [part.rows.reqs[row] for part in sampled for row in part.last]
        ending += [req for req in completed if not req.samples]
        return InFlight(epoch, self._num_ended, routes, completed, ending, sampled, scored, pooled)

    def _build(self, plan: StepPlan, epoch: ServingEpoch) -> ForwardBatch:
        """Build the step's batch.  Its tokens get slots, noted as written under `epoch`."""
        extends, decodes, cache = plan.extends, plan.decodes, self._cache
        inputs, stamp = decodes.inputs, self._runner.kv_pool.stamp
        slots = cache.extend_each(decodes.generation, inputs.pool_indices, inputs.positions)
        stamp(slots, epoch.weight_epoch)
        for item in extends:
            stamp(cache.slots(item.req, item.start, item.start + item.count), epoch.weight_epoch)
        batch = build_forward_batch([_input(item) for item in extends] if extends else [], inputs, slots, cache.pool)
        if cache.states is not None:
            cache.states.prepare(batch, [item.req for item in extends] if extends else (), decodes.reqs)
        is_known = self._decode_adapters[0] == decodes.generation and not plan.extends
        batch.adapters = self._decode_adapters[1] if is_known else self._adapters_of(plan)
        if self._replays(plan):
            batch.forced_routes = _forced_routes(plan, cache.pool.device)
        return batch

    def _adapters_of(self, plan: StepPlan) -> torch.Tensor | None:
        """Return the adapter slot of each token of the step [T]; None if no request of it has an adapter."""
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
        if not rows.info.restricted:
            return
        before = self._unfinished
        if before is not None:
            self._wait(before)
            for part in before.sampled:
                for req, token_id in zip(part.rows.reqs, part.tokens.token_ids.tolist()):
                    restriction = req.restriction
                    if restriction is not None and req.finished is None:
                        restriction.feed(req.output_ids[restriction.num_fed :])
                        if restriction.num_fed == len(req.output_ids):
                            restriction.feed([token_id])
        rows.restrict()

    def kind_of(self, plan: StepPlan) -> StepKind:
        """Return the kind of this rank's step."""
        if self._replays(plan):
            return StepKind.GIVEN_ROUTES
        return StepKind.PROMPTS if plan.extends else StepKind.DECODE

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

    def _pool_prompts(
        self, extends: Sequence[Extend], hidden_TD: torch.Tensor, epoch: ServingEpoch
    ) -> list[tuple[Req, torch.Tensor]]:
        """Return the rows that the step adds to requests that pool."""
        pooled, end = [], 0
        for item in extends:
            begin, end = end, end + item.count
            if item.req.output.pool is not None:
                rows = take_rows(item, hidden_TD[begin:end], self._runner.state.model, epoch)
                if rows is not None:
                    pooled.append((item.req, rows))
        return pooled

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
        if outgoing:
            self._num_ended += sum(req.finished is not None for req in outgoing)
        return outgoing, num_entered

    def _wait(self, step: InFlight) -> None:
        """Wait until the results of a step are on the host."""
        if step.copies is not None:
            step.copies.wait(self._runner.state.model.parallel.wait_for)


def _spans(plan: StepPlan) -> Iterator[tuple[Req, int, int]]:
    """Yield the first position and the count of each request's tokens in the step, in the order of its batch."""
    for item in plan.extends:
        yield item.req, item.start, item.count
    for req in plan.decodes.reqs:
        yield req, req.device_len, 1


def _input(item: Extend) -> ExtendInput:
    req = item.req
    token_ids = req.tokens(item.start, item.start + item.count)
    return ExtendInput(token_ids, req.pool_index, item.start, item.completes and req.samples)


def _forced_routes(plan: StepPlan, device: torch.device) -> torch.Tensor | None:
    """Return the routes that requests of the step replay, for the routers: [L, T, K]; None if all rows are free."""
    spans = list(_spans(plan))
    example = next((req.source.replay for req, _, _ in spans if req.source.replay is not None), None)
    if example is None:
        return None
    _, num_layers, top_k = example.shape
    forced_TLK = np.full((sum(count for _, _, count in spans), num_layers, top_k), _FREE, dtype=np.int64)
    first = 0
    for req, start, count in spans:
        if (replay := req.source.replay) is not None:
            rows_RLK = np.frombuffer(replay.data, dtype="<u2").reshape(replay.shape)
            begin = start - replay.start  # among the rows that the request sent
            known = rows_RLK[max(begin, 0) : max(begin + count, 0)]
            place = first + max(-begin, 0)
            forced_TLK[place : place + len(known)] = known
        first += count
    return to_device(torch.from_numpy(forced_TLK).transpose(0, 1).contiguous(), device)
