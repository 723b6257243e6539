"""Runs a model step by step over a real KV pool with batches laid out by hand.

Slots are handed out in a shuffled order, so that a mistake in index arithmetic cannot hide behind an identity map, and
unwritten slots hold NaN.

Shapes: T tokens, V vocabulary, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rollout.attention.registry import create_attention_backend
from rollout.core.forward_batch import DecodeRows, ForwardBatch, StateOperands
from rollout.layers.context import ForwardContext, RouteHook, States
from rollout.memory.kv_pool import KVPool
from rollout.memory.state_pool import StatePool
from rollout.model.decoder import DecoderForCausalLM


@dataclass
class StepOutput:
    """Rows of one request in one step."""

    log_probs: torch.Tensor  # [T, V]
    routes: torch.Tensor  # [T, L, K] logical ids


class ForwardHarness:
    """Requests are small integers; `lengths[r]` is how many of its tokens have their KV."""

    def __init__(
        self, model: DecoderForCausalLM, max_requests: int = 8, max_context: int = 128, backend: str = "torch_native"
    ) -> None:
        self.model = model
        num_slots = max_requests * max_context
        self.pool = KVPool(num_slots, model.kv_layers, model.dtype)
        self.state_pool: StatePool | None = None  # row n belongs to request n
        if any(model.state_layers):
            self.state_pool = StatePool(max_requests, model.state_layers, model.dtype)
        for tensor in (*self.pool.tensors, *(self.state_pool.tensors if self.state_pool else ())):
            tensor.fill_(float("nan"))
        self.attention = create_attention_backend(backend, self.pool)
        slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(7))
        self.req_to_token = slots.view(max_requests, max_context)
        self.lengths = [0] * max_requests

    def batch(self, extends: Mapping[int, Sequence[int]], decodes: Mapping[int, int]) -> ForwardBatch:
        """Make a batch: `extends` maps requests to their next tokens, `decodes` to their one next token."""
        ids: list[int] = []
        positions: list[int] = []
        out_cache_loc: list[int] = []
        prefix_lens = [self.lengths[request] for request in extends]
        states = self._states(extends, decodes)
        for request, tokens in (*extends.items(), *((r, [token]) for r, token in decodes.items())):
            start = self.lengths[request]
            ids += list(tokens)
            positions += range(start, start + len(tokens))
            out_cache_loc += self.req_to_token[request, start : start + len(tokens)].tolist()
            self.lengths[request] += len(tokens)
        decode_rows = torch.tensor(list(decodes), dtype=torch.int64)
        decode_lens = torch.tensor([self.lengths[request] for request in decodes], dtype=torch.int64)
        return ForwardBatch(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            out_cache_loc=torch.tensor(out_cache_loc, dtype=torch.int64),
            req_to_token=self.req_to_token,
            extend_req_pool_indices=list(extends),
            extend_prefix_lens=prefix_lens,
            extend_lens=[len(tokens) for tokens in extends.values()],
            decode=DecodeRows(decode_rows, decode_lens, decode_rows, decode_lens),
            logits_rows=torch.arange(len(ids)),
            states=states,
        )

    def context(self, batch: ForwardBatch, hooks: Sequence[RouteHook]) -> ForwardContext:
        states = None
        if self.state_pool is not None and batch.states is not None:
            states = States(self.state_pool, batch.states)
        return ForwardContext(batch, self.attention, hooks, states=states)

    def _states(self, extends: Mapping[int, Sequence[int]], decodes: Mapping[int, int]) -> StateOperands | None:
        """Return the states of a step; called before `lengths` are updated to after the step."""
        if self.state_pool is None:
            return None
        rows = [*extends, *decodes]
        lens = [len(tokens) for tokens in extends.values()] + [1] * len(decodes)
        sources = [row if self.lengths[row] else -1 for row in rows]
        none = torch.empty((0, 3), dtype=torch.int64)
        return StateOperands(*(torch.tensor(values, dtype=torch.int64) for values in (lens, rows, sources)), none)

    @torch.inference_mode()
    def step(
        self, extends: Mapping[int, Sequence[int]] | None = None, decodes: Mapping[int, int] | None = None
    ) -> dict[int, StepOutput]:
        """Run one forward, and return the rows of each request."""
        extends, decodes = extends or {}, decodes or {}
        counts = [len(tokens) for tokens in extends.values()] + [1] * len(decodes)
        batch = self.batch(extends, decodes)
        num_layers, top_k = len(self.model.moe_layer_ids), self.model.config.num_experts_per_tok
        routes = torch.full((batch.num_tokens, num_layers, top_k), -1, dtype=torch.int64)

        def capture(moe_layer: int, logical_ids_TK: torch.Tensor) -> None:
            routes[:, moe_layer] = logical_ids_TK

        self.attention.plan(batch)
        hidden = self.model(batch, self.context(batch, [capture]))
        logits = self.model.compute_logits(hidden[batch.logits_rows])
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        parts = zip((*extends, *decodes), log_probs.split(counts), routes.split(counts), strict=True)
        return {request: StepOutput(rows, chosen) for request, rows, chosen in parts}
