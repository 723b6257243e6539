"""`DraftRunner`: the forwards of a draft that is a model, over the served model's KV slots.

    position     0 .. h-1         h .. n-1               n       n+1          of a request with n known tokens
    draft        has its KV       one span               d1      d2           one row for each more token
                                  `-> proposes d1        `-> d2  `-> d3

A slot holds the KV of its token in both pools.  So a prefix that the served model shares is shared here, too.  Old or
missing KV makes worse proposals, and changes nothing else: the served model verifies them.

With attention DP each group of ranks has requests of its own.  A draft without experts exchanges nothing between them.
The experts of a draft are spread over all ranks.  Then the groups tell each other how many tokens they bring to each
forward, and all run the forwards to which any of them brings some.

Shapes: T rows of a forward, D hidden, N sequences that get proposals, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import DecodeRows, ForwardBatch
from rollout.core.host_copy import to_device
from rollout.distributed.communicator import Communicator
from rollout.distributed.parallel import Parallel
from rollout.executor.draft_graphs import DraftGraphs
from rollout.executor.input_builder import DecodeInput, ExtendInput, build_forward_batch
from rollout.executor.recorded_forward import RecordedForward
from rollout.layers.context import ForwardContext
from rollout.memory.kv_pool import KVPool, ReqToTokenPool
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.draft_model import DraftModel

# Takes logits [N, V] of the first N sequences that get proposals, and the number of the proposal, from 0 on.  Returns
# the proposed ids [N].
Pick = Callable[[torch.Tensor, int], torch.Tensor]
_NOTHING = -1


class StandaloneDraft:
    """A whole model as a draft.  `recorded`: its forward by tapes; None: it runs in Python."""

    needs_hidden = False

    def __init__(self, model: DecoderForCausalLM, recorded: RecordedForward | None) -> None:
        self.model = model
        self.kv_layers = model.kv_layers
        self.has_experts = model.config.is_moe
        self._recorded = recorded

    def __call__(self, batch: ForwardBatch, context: ForwardContext, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        if self._recorded is None:
            return self.model(batch, context)
        return self._recorded(batch, context, None, ())[0]

    def in_python(self, batch: ForwardBatch, context: ForwardContext, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """Return the states as a call does, without a tape."""
        return self.model(batch, context)

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden_ND)


class DraftSpan(NamedTuple):
    """Rows of one sequence whose draft KV is computed: at the positions `start ..`, one for each of `token_ids`.

    `hidden_TD` are the served model's hidden states of these positions, for a draft that needs them.
    """

    pool_index: int
    start: int
    token_ids: list[int]
    hidden_TD: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class DraftRunner:
    """Owns the KV of a draft, and runs it.

    Called in inference mode, on all ranks that share requests with the same arguments.  `attention` is over `kv_pool`,
    which has the same slots as the served model's.  With `meets_groups` all groups of ranks call `propose` in each
    turn, also without spans.
    """

    def __init__(
        self, model: DraftModel, kv_pool: KVPool, attention: AttentionBackend, parallel: Parallel, most: int
    ) -> None:
        """Run `model` on its own KV, to propose up to `most` tokens of a sequence at once."""
        self.model = model
        self.meets_groups = model.has_experts and parallel.attn_dp.size > 1
        self._ranks = parallel.attn_tp
        self._groups = parallel.attn_dp
        self._most = most
        self.kv_pool = kv_pool
        self._attention = attention
        self.graphs: DraftGraphs | None = None  # None: no forward is replayed
        # what each slot has the KV of: position << 32 | token id.  Another prefix with the same is a worse proposal.
        self._content = np.full(kv_pool.padding_slot, _NOTHING, dtype=np.int64)

    @property
    def attention(self) -> AttentionBackend:
        """The attention over its KV."""
        return self._attention

    @property
    def ranks(self) -> Communicator:
        """The ranks that share its requests."""
        return self._ranks

    def forget(self) -> None:
        """Forget what each slot has the KV of, as after a flush: all of it is computed anew."""
        self._content[:] = _NOTHING

    def known_len(self, slots: torch.Tensor, token_ids: np.ndarray) -> int:
        """Return how many of a sequence's first tokens have their KV here: slots and ids int64 [n], on the host."""
        differs = self._content[slots.numpy()] != _content(0, token_ids)
        return int(differs.argmax()) if differs.any() else len(token_ids)

    def propose(
        self, spans: Sequence[DraftSpan], counts: Sequence[int], pool: ReqToTokenPool, pick: Pick
    ) -> list[list[int]]:
        """Compute all spans in one forward, and propose `counts[i]` tokens after span i, with a forward for each depth.

        The counts do not grow from span to span, and none is above `most`.  `pool` has slots for the rows of the
        spans, and behind each span one for every proposed token but the last.
        """
        forwards = self._tokens_of_forwards(spans, counts)
        proposed: list[list[int]] = [[] for _ in spans]
        if not forwards:
            return proposed
        hidden_ND = self._run_spans(spans, pool, forwards[0])
        count = sum(count > 0 for count in counts)
        ends = torch.tensor([len(span.token_ids) for span in spans], dtype=torch.int64).cumsum(0) - 1
        hidden_ND = hidden_ND[to_device(ends[:count], hidden_ND.device)]
        rows_N = torch.tensor([span.pool_index for span in spans], dtype=torch.int64)
        positions_N = torch.tensor([span.end for span in spans], dtype=torch.int64)
        drawn: list[torch.Tensor] = []
        newest_N = torch.empty(0, dtype=torch.int64, device=pool.device)
        for depth in range(len(forwards)):
            if count:
                newest_N = pick(self.model.compute_logits(hidden_ND), depth)
                drawn.append(newest_N)
            count = sum(wanted > depth + 1 for wanted in counts)
            if depth + 1 < len(forwards):
                batch = _single_rows(newest_N[:count], rows_N[:count], positions_N[:count] + depth, pool)
                hidden_ND = self._forward(batch, hidden_ND[:count], forwards[depth + 1])
        if drawn:
            _enter(proposed, drawn, self._ranks)
        for span, ids in zip(spans, proposed, strict=True):
            if ids:
                self.note(pool, span.pool_index, span.end - 1, [span.token_ids[-1], *ids[:-1]])
        return proposed

    def _tokens_of_forwards(self, spans: Sequence[DraftSpan], counts: Sequence[int]) -> list[list[int]]:
        """Return the tokens of each forward that is run: of each group where the groups meet, else this one's alone."""
        mine = [sum(len(span.token_ids) for span in spans)]
        mine += [sum(wanted > depth for wanted in counts) for depth in range(1, self._most)]
        told = self._groups.gather_ints(mine) if self.meets_groups else [mine]
        return [list(tokens) for tokens in zip(*told, strict=True) if any(tokens)]

    def note(self, pool: ReqToTokenPool, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Note the tokens of the positions `start ..` of a row, whose KV is written by now or by the next call."""
        slots = pool.host_table[row, start : start + len(token_ids)].numpy()
        self._content[slots] = _content(start, np.array(token_ids, dtype=np.int64))

    def _run_spans(self, spans: Sequence[DraftSpan], pool: ReqToTokenPool, tokens: list[int]) -> torch.Tensor:
        nothing = torch.empty(0, dtype=torch.int64)
        extends = [ExtendInput(span.token_ids, span.pool_index, span.start, 1) for span in spans]
        batch = build_forward_batch(extends, DecodeInput(nothing, nothing, nothing, nothing), nothing, pool)
        hidden = [span.hidden_TD for span in spans if span.hidden_TD is not None]
        return self._forward(batch, torch.cat(hidden) if hidden else None, tokens)

    def _forward(self, batch: ForwardBatch, hidden_TD: torch.Tensor | None, tokens: list[int]) -> torch.Tensor:
        given = hidden_TD if self.model.needs_hidden else None
        replayed = None if self.graphs is None else self.graphs.forward(batch, given)
        if replayed is not None:
            return replayed
        if self.meets_groups:
            batch.global_num_tokens = tokens
        self._attention.plan(batch)
        return self.model(batch, ForwardContext(batch, self._attention), given)


def _enter(proposed: list[list[int]], drawn: Sequence[torch.Tensor], ranks: Communicator) -> None:
    """Append the ids of all depths to the proposals, in one transfer to the host.

    All ranks take the first one's, as a refresh that failed may have left other weights of the draft on each of them.
    """
    ids = iter(ranks.broadcast(torch.cat(list(drawn))).tolist())
    for tokens_N in drawn:
        for own in proposed[: tokens_N.shape[0]]:
            own.append(next(ids))


def _content(start: int, token_ids: np.ndarray) -> np.ndarray:
    content: np.ndarray = np.arange(start, start + len(token_ids)) << 32 | token_ids
    return content


def _single_rows(
    token_ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, pool: ReqToTokenPool
) -> ForwardBatch:
    """Return the batch of one row for each of `rows`, with these tokens; `rows` and `positions` are on the host."""
    indices, places, lens = to_device(torch.stack([rows, positions, positions + 1]), pool.device).unbind()
    return ForwardBatch(
        input_ids=token_ids,
        positions=places,
        out_cache_loc=pool.table[indices, places],
        req_to_token=pool.table,
        extend_req_pool_indices=[],
        extend_prefix_lens=[],
        extend_lens=[],
        decode=DecodeRows(indices, lens, rows, positions + 1),
        logits_rows=torch.arange(len(rows), device=pool.device),
    )
