"""The matrix of latent attention that makes keys and values of a latent, and the adapters that change it.

An adapter adds B A to the matrix.  As the matrix is applied to queries and to the result of attention, so is B A:

    queries of head h   + (q . B_k,h) . A      A as it is
    values of head h    + B_v,h . (A . mean)

Shapes: T tokens, H heads of this rank, R latent, S slots, X greatest rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollout.kernels.places import LatentSizes
from rollout.layers.build import Build
from rollout.layers.linear import sharded_entry
from rollout.layers.lora import AdaptedLayer, AdapterSlots, LoraModule, LoraPlace, SlotSizes
from rollout.layers.shard import Shard
from rollout.layers.weight_entry import WeightEntry


class LatentSlots(AdapterSlots):
    """Slots of a matrix [H (nope + v), R]: each head has its rows of B, and all share A, which lies there twice.

    `keys_a` [S, H, nope, X], `keys_b` [S, 1, X, R], `values_a` [S, 1, R, X], `values_b` [S, H, X, v].
    """

    def __init__(self, build: Build, sizes: SlotSizes, module: LoraModule, heads: int, of_head: LatentSizes) -> None:
        super().__init__(build, sizes, [module])
        self._heads, self._nope, (slots, most) = heads, of_head.nope, sizes
        self.keys_a = build.empty(slots, heads, of_head.nope, most).zero_()
        self.keys_b = build.empty(slots, 1, most, of_head.rank).zero_()
        self.values_a = build.empty(slots, 1, of_head.rank, most).zero_()
        self.values_b = build.empty(slots, heads, most, of_head.value).zero_()

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        return self.keys_a, self.keys_b, self.values_a, self.values_b

    def places_a(self, slot: int, part: int, rank: int) -> list[LoraPlace]:
        return [
            LoraPlace(self.keys_b, lambda share: share, lambda held: held[slot, 0, :rank]),
            LoraPlace(self.values_a, lambda share: share, lambda held: held[slot, 0, :, :rank].t()),
        ]

    def places_b(self, slot: int, part: int, rank: int) -> list[LoraPlace]:
        heads, nope = self._heads, self._nope
        return [
            LoraPlace(
                self.keys_a, lambda b: b.unflatten(0, (heads, -1))[:, :nope], lambda held: held[slot, :, :, :rank]
            ),
            LoraPlace(
                self.values_b,
                lambda b: b.unflatten(0, (heads, -1))[:, nope:],
                lambda held: held[slot, :, :rank].transpose(1, 2),
            ),
        ]

    def add_to_queries(self, out_THK: torch.Tensor, query: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        """Return absorbed queries [T, H, R + rd] plus the products of `query` [T, H (nope + rd)] with adapters."""
        return self._ops.add_head_lora(out_THK, query, slots_T, self.keys_a, self.keys_b, self._ranks, self._heads)

    def add_to_values(self, out: torch.Tensor, latents: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        """Return values [T, H v] plus the products of mean latents [T, H R] with adapters."""
        return self._ops.add_head_lora(out, latents, slots_T, self.values_a, self.values_b, self._ranks, self._heads)


class LatentHeads(AdaptedLayer):
    """The matrix from latents to keys and values, as the operators store it: nothing computed from it is kept."""

    lora: LatentSlots | None = None

    def __init__(self, heads: Shard, sizes: LatentSizes, build: Build) -> None:
        self._build, self._heads, self._sizes = build, heads, sizes
        self.weight = build.ops.storage.empty_latent(heads.length, sizes, build.dtype, build.device)

    def expanded(self, latents_PL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [P, H, nope + rd] and values [P, H, v] of latents [P, R + rd], for a row-major matrix."""
        heads, nope, value = self._heads.length, self._sizes.nope, self._sizes.value
        plain_PR, turned_Pr = latents_PL[:, : self._sizes.rank], latents_PL[:, self._sizes.rank :]
        both = self._build.ops.linear(plain_PR.contiguous(), self.weight, self._rows.length)
        both_PHd = both.unflatten(1, (heads, nope + value))
        keys = both.new_empty(both.shape[0], heads, nope + turned_Pr.shape[1])
        keys[..., :nope] = both_PHd[..., :nope]
        keys[..., nope:] = turned_Pr.unsqueeze(1)
        return keys, both_PHd[..., nope:]

    def adapted_queries(
        self, absorbed_THK: torch.Tensor, query: torch.Tensor, adapters_T: torch.Tensor | None
    ) -> torch.Tensor:
        """Return absorbed queries as adapters change them.  `adapters`: see `MergedLinear.__call__`."""
        if self.lora is None or adapters_T is None:
            return absorbed_THK
        return self.lora.add_to_queries(absorbed_THK, query, adapters_T)

    def adapted_values(
        self, values: torch.Tensor, latents: torch.Tensor, adapters_T: torch.Tensor | None
    ) -> torch.Tensor:
        """Return values of heads as adapters change them."""
        if self.lora is None or adapters_T is None:
            return values
        return self.lora.add_to_values(values, latents, adapters_T)

    def lora_modules(self, prefix: str) -> dict[str, LoraModule]:
        return {prefix: LoraModule(0, Shard.whole(self._sizes.rank), self._rows)}

    def reserve_lora(self, sizes: SlotSizes) -> LatentSlots:
        if self.lora is None:
            (module,) = self.lora_modules("").values()
            self.lora = LatentSlots(self._build, sizes, module, self._heads.length, self._sizes)
        return self.lora

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        rows = self._rows
        place = self._build.ops.storage.latent_place(self.weight, self._sizes)
        yield sharded_entry(f"{prefix}.weight", self.weight, place, (rows.total, self._sizes.rank), 0, rows)

    @property
    def _rows(self) -> Shard:
        return self._heads.times(self._sizes.nope + self._sizes.value)
