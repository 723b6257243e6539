"""Attention over paged KV laid out by hand on a device, and the same in float64, one query at a time.

Slots are handed out shuffled, and what no sequence holds is NaN: a backend that reads a wrong slot shows.

Shapes: T tokens of the step, H query heads, Hkv key/value heads, hd key size, S slots, L length of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import DecodeRows, ForwardBatch
from rollout.core.specs.layer_specs import KVKind
from rollout.memory.kv_pool import KVPool, KVScale

MAX_CONTEXT = 512
NO_SCALE = KVScale()


@dataclass(frozen=True)
class Lengths:
    """The lengths of a step: (cached, computed) tokens of prompts, and lengths of decodes, with this step's token."""

    extends: Sequence[tuple[int, int]] = ()
    decodes: Sequence[int] = ()

    @property
    def totals(self) -> list[int]:
        return [cached + new for cached, new in self.extends] + list(self.decodes)

    @property
    def queries(self) -> list[int]:
        return [new for _, new in self.extends] + [1] * len(self.decodes)


class PagedCase:
    """A pool of one layer of `kind`, filled with random keys and values for up to `max_requests` sequences.

    They are held in `stored`, by default `dtype`, and are worth the numbers there times `scale`.
    """

    def __init__(
        self,
        kind: KVKind,
        dtype: torch.dtype,
        device: torch.device,
        max_requests: int = 32,
        stored: torch.dtype | None = None,
        scale: KVScale = NO_SCALE,
    ) -> None:
        num_slots, generator = max_requests * MAX_CONTEXT, torch.Generator().manual_seed(11)
        self.pool = KVPool(num_slots, [kind], dtype, device, stored=stored, scales=[scale])
        self.kind, self.dtype, self.device, self.scale = kind, dtype, device, scale
        slots = torch.randperm(num_slots, generator=generator)
        self.table = slots.view(max_requests, MAX_CONTEXT).to(device)
        for tensor in self.pool.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self._content = [(k.clone(), v.clone()) for k, v in zip(self.pool.k, self.pool.v, strict=True)]

    def hide_the_rest(self, lengths: Lengths) -> None:
        """Fill the pool with NaN wherever no token of these sequences lies."""
        held = torch.cat([self.table[row, :length] for row, length in enumerate(lengths.totals)])
        for (keys, values), k, v in zip(self._content, self.pool.k, self.pool.v, strict=True):
            k.fill_(float("nan"))
            v.fill_(float("nan"))
            for tensor, content in ((k, keys), (v, values)):
                tensor.view(torch.uint8)[held] = content.view(torch.uint8)[held]  # rows of float8, too

    def batch(self, lengths: Lengths) -> ForwardBatch:
        count, rows = len(lengths.extends), torch.arange(len(lengths.totals), device=self.device)
        spans = [
            (row, total - new, total)
            for row, (new, total) in enumerate(zip(lengths.queries, lengths.totals, strict=True))
        ]
        positions = torch.cat([torch.arange(first, last, device=self.device) for _, first, last in spans])
        decodes = torch.tensor(list(lengths.decodes), dtype=torch.int64)
        return ForwardBatch(
            input_ids=torch.zeros_like(positions),
            positions=positions,
            out_cache_loc=torch.cat([self.table[row, first:last] for row, first, last in spans]),
            req_to_token=self.table,
            extend_req_pool_indices=list(range(count)),
            extend_prefix_lens=[cached for cached, _ in lengths.extends],
            extend_lens=[new for _, new in lengths.extends],
            decode=DecodeRows(rows[count:], decodes.to(self.device), rows[count:].cpu(), decodes),
            logits_rows=torch.arange(len(positions), device=self.device),
        )

    def queries(self, lengths: Lengths, heads: int, seed: int = 0) -> torch.Tensor:
        """Return random queries, [T, H, hd]."""
        generator = torch.Generator().manual_seed(seed)
        shape = (sum(lengths.queries), heads, self.kind.key_size)
        return torch.randn(shape, generator=generator).to(self.dtype).to(self.device)

    def wanted(
        self,
        q: torch.Tensor,
        lengths: Lengths,
        scale: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the attention token by token in float64 on the CPU: [T, H * value size]."""
        heads, found, token = q.shape[1], [], 0
        table, query = self.table.cpu(), q.cpu().double()
        keys, values = self.pool.k[0].cpu().double() * self.scale.k, self.pool.v[0].cpu().double() * self.scale.v
        group = heads // keys.shape[1]
        for row, (new, total) in enumerate(zip(lengths.queries, lengths.totals, strict=True)):
            for position in range(total - new, total):
                first = 0 if window is None else max(0, position - window + 1)
                slots = table[row, first : position + 1]
                k_LHd = keys[slots].repeat_interleave(group, 1)
                v_LHd = values[slots].repeat_interleave(group, 1)
                scores_HL = torch.einsum("hd,lhd->hl", query[token], k_LHd) * (scale or q.shape[-1] ** -0.5)
                if sinks is not None:
                    scores_HL = torch.cat((scores_HL, sinks.cpu().double()[:, None]), 1)
                shares_HL = scores_HL.softmax(-1)[:, : len(slots)]
                found.append(torch.einsum("hl,lhd->hd", shares_HL, v_LHd).flatten())
                token += 1
        return torch.stack(found)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `want`; NaN counts as infinite."""
    error = (got.cpu().double() - want).norm() / want.norm()
    return float("inf") if error.isnan() else error.item()


def attended(
    backend: AttentionBackend, case: PagedCase, lengths: Lengths, q: torch.Tensor, **how: object
) -> torch.Tensor:
    backend.plan(case.batch(lengths))
    return backend.attend(0, q, **how)  # type: ignore[arg-type]
