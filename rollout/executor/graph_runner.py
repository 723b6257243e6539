"""`GraphRunner`: steps that only decode, as recordings that a device plays without Python between its kernels.

    startup     capture for 256, .. 4, 2, 1 requests             the sizes share their memory, the largest comes first
    a step      fill the buffers | plan attention | replay       n requests take the next larger size, padded
                copy the results out

A replay reads the buffers and the attention's workspaces as the plan of its step left them.  Without a plan it would
read indices of another step, or freed ones.  So each replay takes the `StepPlan` of its step, which allows it once.

Each size has two recordings.  One is the forward, which writes the routers' choices into a buffer; a server of adapters
has a second one, for steps with adapters.  The other is output head and sampling, with log-probabilities and masks.  A
step with rows that are not plain (`PlainRows`) replays only the first.

A step that verifies drafts is replayed as one that decodes, with a row for each of its tokens.  Each row reads the KV
of its request by itself, so `takes_verify` has a limit.  Steps beyond it run in pieces (`piece_runner`), whose
attention reads it once.

The ranks of an engine exchange tensors within a recording, of sizes that padding fixes.  They replay together: each
takes the size for the rank with the most tokens, also if it has none itself, and plays padding.

Shapes: n requests of a step, D hidden, L MoE layers, K top-k.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from capture.capturer import RoutedExpertsCapturer
from rollout.attention.base import AttentionBackend
from rollout.core.errors import FatalError
from rollout.core.forward_batch import ForwardBatch, StepKind
from rollout.core.sampling_params import SamplingParams
from rollout.executor.captures import Conditions, GraphPool, Replay, adapted_forms, forward_into, reads_little_again
from rollout.executor.graph_buffers import GraphBuffers
from rollout.executor.input_builder import as_decoding_rows
from rollout.layers.context import States
from rollout.memory.state_pool import StatePool
from rollout.model.model_state import ModelState
from rollout.sampling.base import PlainTokens, SampledTokens, Sampler
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow


class StepPlan:
    """A step of `count` rows that can be played now, padded to `size`.  Only `GraphRunner` makes it.

    It allows each part of the step once, in order, until the next step is planned.  `is_adapted`: with adapters.
    """

    def __init__(self, size: int, count: int, is_adapted: bool) -> None:
        self.size = size
        self.count = count
        self.is_adapted = is_adapted
        self.played: list[str] = []


PlannedReplay = Callable[[StepPlan], None]


@dataclass(frozen=True)
class _Captured:
    """The forward of steps of one size and form."""

    batch: ForwardBatch
    attention: AttentionBackend
    forward: PlannedReplay


class GraphRunner:
    """Called by `ModelRunner`.  `sizes`: ascending numbers of requests; `new_pool` makes memory for recordings."""

    def __init__(
        self,
        state: ModelState,
        attention: AttentionBackend,
        sampler: Sampler,
        capturer: RoutedExpertsCapturer,
        buffers: GraphBuffers,
        sizes: Sequence[int],
        new_pool: Callable[[], GraphPool],
        state_pool: StatePool | None = None,
    ) -> None:
        self._state = state
        self._attention = attention
        self._sampler = sampler
        self._capturer = capturer
        self._buffers = buffers
        self.sizes = list(sizes)
        self._new_pool = new_pool
        self._state_pool = state_pool  # None: the model has no recurrent layers
        self._pool = new_pool()
        self._captured: dict[tuple[int, bool], _Captured] = {}  # by size and form
        self._sampling: dict[int, PlannedReplay] = {}  # the same for all forms of a size
        self._forms = adapted_forms(state)
        self._conditions = Conditions(state)
        self._plan: StepPlan | None = None  # of the step whose inputs are in the buffers
        self._plain_of: SamplingBatchInfo | None = None  # its rows are in the buffers
        self._samples = sampler.plain_rows(_one_row(state), buffers.outputs.hidden.device) is not None

    def capture_all(self, with_routes: bool) -> None:
        """Capture every size.  The largest is first, as the others share its memory.  `with_routes`: see `forward`."""
        self._renew(with_routes)
        for size in reversed(self.sizes):
            for is_adapted in self._forms:
                self._capture(size, is_adapted, with_routes)

    def forward(self, batch: ForwardBatch, with_routes: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Replay the step and return copies of its hidden states [n, D] and, `with_routes`, its logical ids [n, L, K].

        Returns None for steps that are never captured: with prompts or forced routes, or with more rows than the
        largest size.  The ranks of an engine all replay the step or all get None.
        """
        plan = self.plan(batch, with_routes)
        if plan is None:
            return None
        self._captured[plan.size, plan.is_adapted].forward(plan)
        outputs = self._buffers.outputs
        return _owned(outputs.hidden, plan.count), _owned(outputs.routes, plan.count) if with_routes else None

    def sample(self, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens | None:
        """Sample the step of the last `forward` call, as `Sampler.sample` does.

        Returns None if that step was not replayed, or if its rows ask for more than was captured.
        """
        plan = self._plan
        if plan is None:
            return None
        play = self._sampling.get(plan.size)
        if play is None or not self._takes(info):
            return None
        self._buffers.fill_positions(positions_N)
        play(plan)
        tokens = self._buffers.outputs.tokens
        kept = tokens[2:] if info.masked_rows else (part[:0] for part in tokens[2:])
        owned = PlainTokens(*(_owned(part, plan.count) for part in (*tokens[:2], *kept)))
        return SampledTokens.plain(owned, info)

    def plan(self, batch: ForwardBatch, with_routes: bool) -> StepPlan | None:
        """Fill the buffers with the step and plan its attention; None if `forward` returns None for it."""
        self._plan = None
        size = self._size_for(batch)
        if size is None:
            return None
        self._renew(with_routes)
        is_adapted = batch.adapters is not None or self._forms[0]
        step = self._captured.get((size, is_adapted)) or self._capture(size, is_adapted, with_routes)
        self._buffers.fill(as_decoding_rows(batch) if batch.extend_lens else batch)
        return self._planned(step, StepPlan(size, batch.num_tokens, is_adapted))

    def skip(self) -> None:
        """Note that the next step is not replayed, on any rank, so that `sample` returns None for it."""
        self._plan = None

    def takes_verify(self, num_rows: int, num_read_again: int) -> bool:
        """Return whether a step of `num_rows` rows that verifies drafts is replayed, as far as this rank can tell.

        `num_read_again`: the KV that its rows read after the first row of their request has read it, in tokens.
        """
        takes_rows = self._state_pool is None and num_rows <= self.sizes[-1]
        return takes_rows and reads_little_again(self._attention.kv, num_read_again)

    def _size_for(self, batch: ForwardBatch) -> int | None:
        """Return the size that the step is padded to, or None if it is not replayed; the same on all ranks.

        Ranks exchange tensors within the recording, so all replay one size: the one for the rank with the most tokens.
        """
        counts = batch.global_num_tokens
        if counts is None:
            counts, is_plain = [batch.num_tokens], batch.forced_routes is None
            decodes = is_plain and (not batch.extend_lens or batch.kind_everywhere is StepKind.DECODE)
        else:
            decodes = batch.kind_everywhere is StepKind.DECODE
        if not decodes or not 0 < max(counts) <= self.sizes[-1]:
            return None
        return self.sizes[bisect_left(self.sizes, max(counts))]

    def plan_padding(self, size: int) -> StepPlan:
        """Plan a step of a captured `size` without any request: all of its rows are padding."""
        self._buffers.clear()
        return self._planned(self._captured[size, self._forms[0]], StepPlan(size, 0, self._forms[0]))

    def _planned(self, step: _Captured, plan: StepPlan) -> StepPlan:
        step.attention.plan(step.batch)
        self._state.model.plan_replay(step.batch)
        self._plan = plan
        return plan

    def _guarded(self, replay: Replay, size: int, part: str, after: list[str]) -> PlannedReplay:
        """Return `replay` behind a check of its plan.

        The plan must be for a step of `size`, whose inputs are in the buffers, and must have played the parts `after`.
        Otherwise the function raises `FatalError` before anything is launched.
        """

        def play(plan: StepPlan) -> None:
            if plan is not self._plan or plan.size != size or plan.played != after:
                raise FatalError(f"{part} of a captured step of {size} requests was replayed without a plan of its own")
            plan.played.append(part)
            replay()

        return play

    def _takes(self, info: SamplingBatchInfo) -> bool:
        """Return whether the rows of `info` are plain; if so, enter them into the buffers."""
        if self._plain_of is not info:
            rows = self._sampler.plain_rows(info, self._buffers.outputs.hidden.device)
            if rows is None:
                return False
            self._buffers.fill_plain(rows)
            self._plain_of = info
        return True

    def _renew(self, with_routes: bool) -> None:
        """Drop the recordings if they no longer hold."""
        if self._conditions.have_changed(with_routes):
            self._captured.clear()
            self._sampling.clear()
            self._pool = self._new_pool()

    def _capture(self, size: int, is_adapted: bool, with_routes: bool) -> _Captured:
        attention = self._attention.for_graph(size)
        assert attention is not None, "build asks before it makes a GraphRunner"
        buffers, outputs, model = self._buffers, self._buffers.outputs, self._state.model
        buffers.clear()
        batch = buffers.batch(size, is_adapted)
        if model.parallel.attn_dp.size > 1:
            batch.global_num_tokens = [size] * model.parallel.attn_dp.size
        attention.plan(batch)
        states = None if self._state_pool is None or batch.states is None else States(self._state_pool, batch.states)
        rows, positions = buffers.plain_rows(size)
        routes = outputs.routes[:size] if with_routes else None

        def forward() -> None:
            forward_into(self._state, self._capturer, batch, attention, outputs.hidden[:size], routes, states)

        def sample() -> None:
            logits = model.compute_logits(outputs.hidden[:size])
            self._sampler.sample_plain(logits, rows, positions, outputs.tokens.first(size))

        play_forward = self._guarded(self._pool.capture(forward), size, "forward", [])
        if self._samples and size not in self._sampling:
            self._sampling[size] = self._guarded(self._pool.capture(sample), size, "sample", ["forward"])
        step = self._captured[size, is_adapted] = _Captured(batch, attention, play_forward)
        return step


def graph_batch_sizes(most: int) -> list[int]:
    """Return the numbers of requests for which a step is captured, ascending, up to and including `most`.

    Small sizes are close together, as a padding row is a large share of a small step.
    """
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


def _owned(buffer: torch.Tensor, count: int) -> torch.Tensor:
    """Copy the first rows, as the next replay overwrites the buffer, perhaps before this step is finished."""
    return buffer[:count].clone()


def _one_row(state: ModelState) -> SamplingBatchInfo:
    row = SamplingRow(SamplingParams(temperature=0.0), 0, (), (), [])
    return SamplingBatchInfo([row], state.model.config.vocab_size)
