"""Steps over random KV for any attention backend, and the right results, written out in float64.

Only the slots that a step may read hold numbers, all others NaN; slots are shuffled, and layers with a window have a
table and slots of their own, which are right for the positions that the step sees.

Shapes: T tokens of the step, R requests, C positions, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import DecodeRows, ForwardBatch, WindowOperands
from rollout.core.specs.layer_specs import KVKind, WindowKV
from rollout.memory.kv_pool import KVPool, KVScale
from tests.kernels import error

# Relative error in the 2-norm: a few roundings of the result.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class LayerCase:
    """A layer; its window is that of its `kind`."""

    kind: KVKind
    num_heads: int
    has_sinks: bool = False
    scale: float | None = None

    @property
    def window(self) -> int | None:
        return self.kind.window if isinstance(self.kind, WindowKV) else None


@dataclass(frozen=True)
class Layout:
    """Requests that extend, as (request, cached, new), then requests that decode, as (request, length)."""

    extends: Sequence[tuple[int, int, int]] = ()
    decodes: Sequence[tuple[int, int]] = ()

    @property
    def spans(self) -> list[tuple[int, range]]:
        """Positions of the step's tokens, by request, in the order of the batch."""
        extends = [(request, range(cached, cached + new)) for request, cached, new in self.extends]
        return extends + [(request, range(length - 1, length)) for request, length in self.decodes]


@dataclass
class AttentionSteps:
    """`layers` over one pool on `device`; the right results are computed on the CPU.

    Keys and values are numbers of `stored`, the dtype of the pool, by default `dtype`, times the layers' `scales`.
    """

    layers: Sequence[LayerCase]
    dtype: torch.dtype
    max_requests: int = 6
    max_context: int = 96
    seed: int = 0
    device: str = "cpu"
    stored: torch.dtype | None = None
    scales: Sequence[KVScale] | None = None
    pool: KVPool = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        self._num_slots = self.max_requests * self.max_context + 1  # nothing is ever kept in the last one
        self.pool = KVPool(
            self._num_slots,
            [case.kind for case in self.layers],
            self.dtype,
            self.device,
            self._num_slots,
            self.stored,
            self.scales,
        )
        shape = (self.max_requests, self.max_context)
        self.req_to_token = torch.randperm(self._num_slots - 1, generator=self._generator).view(shape)
        self._window_slots = torch.randperm(self._num_slots - 1, generator=self._generator).view(shape)
        self.window_table = torch.full(shape, self._num_slots - 1)
        self.queries = [self._random(*shape, case.num_heads, case.kind.key_size) for case in self.layers]
        self.keys = [self._kept(*shape, case.kind.num_heads, case.kind.key_size) for case in self.layers]
        self.values = [
            keys[..., : case.kind.value_size]
            if case.kind.values_in_keys
            else self._kept(*shape, case.kind.num_heads, case.kind.value_size)
            for case, keys in zip(self.layers, self.keys)
        ]
        self.sinks = [2 * self._random(case.num_heads) if case.has_sinks else None for case in self.layers]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def _kept(self, *shape: int) -> torch.Tensor:
        return self._random(*shape).to(self.stored or self.dtype).to(self.dtype)

    def batch(self, layout: Layout) -> ForwardBatch:
        """Write all KV that the step may read into the pool, its own tokens' included; return the step as a batch."""
        spans = layout.spans
        self._write(spans)
        rows = torch.tensor([request for request, span in spans for _ in span], dtype=torch.int64)
        positions = torch.tensor([position for _, span in spans for position in span], dtype=torch.int64)
        requests = torch.tensor([request for request, _ in layout.decodes], dtype=torch.int64)
        lengths = torch.tensor([length for _, length in layout.decodes], dtype=torch.int64)
        device, window_table = self.device, self.window_table.to(self.device)
        return ForwardBatch(
            input_ids=torch.zeros_like(positions, device=device),
            positions=positions.to(device),
            out_cache_loc=self.req_to_token[rows, positions].to(device),
            req_to_token=self.req_to_token.to(device),
            extend_req_pool_indices=[request for request, _, _ in layout.extends],
            extend_prefix_lens=[cached for _, cached, _ in layout.extends],
            extend_lens=[new for _, _, new in layout.extends],
            decode=DecodeRows(requests.to(device), lengths.to(device), requests, lengths),
            logits_rows=torch.empty(0, dtype=torch.int64, device=device),
            window=WindowOperands(self.window_table[rows, positions].to(device), window_table),
        )

    def q(self, layer: int, layout: Layout) -> torch.Tensor:
        """Return the queries of the step's tokens, [T, H, key size]."""
        return torch.cat([self.queries[layer][r, span.start : span.stop] for r, span in layout.spans]).to(self.device)

    def attend(self, backend: AttentionBackend, layer: int, layout: Layout) -> torch.Tensor:
        case, sinks = self.layers[layer], self.sinks[layer]
        sinks = None if sinks is None else sinks.to(self.device)
        return backend.attend(layer, self.q(layer, layout), case.scale, case.window, sinks)

    def check(self, backend: AttentionBackend, layout: Layout) -> None:
        """Plan the step, attend in every layer twice, and compare."""
        backend.plan(self.batch(layout))
        for layer in (*range(len(self.layers)), *range(len(self.layers))):
            self.compare(self.attend(backend, layer, layout), layer, layout)

    def compare(self, out: torch.Tensor, layer: int, layout: Layout) -> None:
        exact = self.exact(layer, layout)
        assert out.dtype == self.dtype and out.shape == exact.shape
        found = error(out.cpu(), exact)
        assert found < TOLERANCES[self.dtype], f"layer {layer}: {found}"

    def exact(self, layer: int, layout: Layout) -> torch.Tensor:
        """Compute the attention of the step in float64, [T, H * value size]."""
        return torch.cat([self._exact(layer, *span) for span in layout.spans])

    def _exact(self, layer: int, request: int, span: range) -> torch.Tensor:
        case, sinks = self.layers[layer], self.sinks[layer]
        group = case.num_heads // case.kind.num_heads
        keys, values = (
            x[layer][request, : span.stop].double().repeat_interleave(group, 1) for x in (self.keys, self.values)
        )
        if self.scales is not None:
            keys, values = keys * self.scales[layer].k, values * self.scales[layer].v
        q = self.queries[layer][request, span.start : span.stop].double()
        scale = case.kind.key_size**-0.5 if case.scale is None else case.scale
        scores = torch.einsum("ihd,jhd->hij", q, keys) * scale
        ago = torch.arange(span.start, span.stop)[:, None] - torch.arange(span.stop)
        scores = scores.masked_fill((ago < 0) | (ago >= (case.window or span.stop)), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(span), 1)], -1)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : span.stop], values).flatten(1)

    def _write(self, spans: Sequence[tuple[int, range]]) -> None:
        self.window_table.fill_(self._num_slots - 1)
        for layer, case in enumerate(self.layers):
            pools = self.pool.k[layer], self.pool.v[layer]
            for pool in pools:
                pool.fill_(torch.nan)
            for request, span in spans:
                first = 0 if case.window is None else max(0, span.start - case.window + 1)
                seen = slice(first, span.stop)
                table = self.req_to_token if case.window is None else self._window_slots
                if case.window is not None:
                    self.window_table[request, seen] = table[request, seen]
                for pool, content in zip(pools, (self.keys[layer], self.values[layer])):
                    pool[table[request, seen].to(self.device)] = content[request, seen].to(self.device, pool.dtype)
