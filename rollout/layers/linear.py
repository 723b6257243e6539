"""Linear layers, plain and merged (several projections of one input in one weight), whole or one rank's shard.

Shapes: T tokens, D input features, O output features, here on this rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from rollout.kernels.operators.fused_experts import ExpertOutputs
from rollout.kernels.ops import Ops
from rollout.kernels.places import Place, ReorderedPlace, ShardPlace, ViewPlace
from rollout.layers.build import Build
from rollout.layers.layer import Layer
from rollout.layers.linear_storage import LinearStorage
from rollout.layers.lora import AdaptedLayer, LoraModule, LoraSlots, SlotSizes
from rollout.layers.norm_rotary import Hidden, RMSNorm
from rollout.layers.shard import Shard
from rollout.layers.weight_entry import WeightEntry
from weight_sync.held_format import HeldFormat


class AdaptedLinear(AdaptedLayer):
    """Base of the linear layers: a matrix, and the slots of adapters that change its product, if there are any."""

    ops: Ops
    storage: LinearStorage
    weight: torch.Tensor
    lora: LoraSlots | None = None

    def reserve_lora(self, sizes: SlotSizes) -> LoraSlots:
        if self.lora is None:
            self.lora = LoraSlots(self.storage.build, sizes, list(self.lora_modules("").values()))
        return self.lora

    def _adapted(self, out_TO: torch.Tensor, hidden_TD: torch.Tensor, adapters_T: torch.Tensor | None) -> torch.Tensor:
        if self.lora is None or adapters_T is None:
            return out_TO
        return self.lora.add(out_TO, hidden_TD, adapters_T)


class MergedLinear(AdaptedLinear):
    """Several projections of one input as one matrix; a checkpoint names each of them as a sibling of this layer.

    `self_attn.qkv_proj` with parts of 64, 32 and 32 rows `{"q_proj": .., "k_proj": .., "v_proj": ..}` holds
    `self_attn.q_proj.weight`, or the shard of it that this rank has, in rows 0..63, and so on.  `orders` has the parts
    whose rows lie in another order than in the checkpoint: which row comes first on this rank, second, ...  With
    `as_sent` it is never held in fewer bits.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, Shard],
        build: Build,
        bias: bool = False,
        orders: Mapping[str, torch.Tensor] | None = None,
        as_sent: bool = False,
    ) -> None:
        self.ops = build.ops
        self.parts = dict(parts)
        self._orders = orders or {}
        self.in_features, self.out_features = in_features, sum(part.length for part in parts.values())
        whole = Shard.whole(in_features)
        self.storage = LinearStorage(build) if as_sent else LinearStorage.of(build, parts, whole, self._orders)
        self.weight = self.storage.empty(self.out_features, in_features)
        self.bias = build.empty(self.out_features) if bias else None

    def __call__(
        self,
        residual_TD: torch.Tensor,
        hidden: Hidden,
        norm: RMSNorm,
        adapters_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return all parts side by side, of the norm of `residual += hidden`: [T, O].

        `adapters` are the slots of the tokens' adapters; None: no token has one.
        """
        if isinstance(hidden, ExpertOutputs) or (self.lora is not None and adapters_T is not None):
            return self.of_normed(norm(residual_TD, hidden), adapters_T)
        matrix = (self.weight, self.out_features, self.bias)
        return self.ops.norm_linear(residual_TD, hidden, norm.weight, norm.eps, *matrix, norm.weight_offset)

    def of_normed(self, normed_TD: torch.Tensor, adapters_T: torch.Tensor | None = None) -> torch.Tensor:
        """Return all parts side by side, of an input that went through its norm already: [T, O]."""
        out_TO = self.ops.linear(normed_TD, self.weight, self.out_features, self.bias)
        return self._adapted(out_TO, normed_TD, adapters_T)

    def lora_modules(self, prefix: str) -> dict[str, LoraModule]:
        parent, inputs = prefix.rpartition(".")[0], Shard.whole(self.in_features)
        return {
            f"{parent}.{part}": LoraModule(index, inputs, rows, self._orders.get(part))
            for index, (part, rows) in enumerate(self.parts.items())
        }

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        parent = prefix.rpartition(".")[0]
        start = 0
        for part, rows in self.parts.items():
            end = start + rows.length
            place = self._in_order(part, self.storage.place(self.weight, range(start, end), self.in_features))
            yield row_entry(f"{parent}.{part}.weight", self.weight, place, rows, self.in_features, self.storage.held)
            if self.bias is not None:
                part_of_bias = self._in_order(part, ViewPlace(self.bias[start:end]))
                yield sharded_entry(f"{parent}.{part}.bias", self.bias, part_of_bias, (rows.total,), 0, rows)
            start = end

    def _in_order(self, part: str, place: Place) -> Place:
        return ReorderedPlace(place, self._orders[part]) if part in self._orders else place


class Linear(AdaptedLinear):
    """`x @ weight.T + bias` with weight [O, D].  With a shard of the inputs, it is one rank's part of a sum.

    All ranks hold the bias, and the one that has the first inputs adds it.  With `as_sent` it is never held in fewer
    bits.
    """

    def __init__(
        self, inputs: Shard, out_features: int, build: Build, bias: bool = False, as_sent: bool = False
    ) -> None:
        self.ops = build.ops
        self.inputs = inputs
        self.in_features, self.out_features = inputs.length, out_features
        rows = {"weight": Shard.whole(out_features)}
        self.storage = LinearStorage(build) if as_sent else LinearStorage.of(build, rows, inputs, {})
        self.weight = self.storage.empty(out_features, inputs.length)
        self.bias = build.empty(out_features) if bias else None
        self._adds_bias = inputs.start == 0

    def __call__(self, hidden_TD: torch.Tensor, adapters_T: torch.Tensor | None = None) -> torch.Tensor:
        bias = self.bias if self._adds_bias else None
        out_TO = self.ops.linear(hidden_TD, self.weight, self.out_features, bias)
        return self._adapted(out_TO, hidden_TD, adapters_T)

    def lora_modules(self, prefix: str) -> dict[str, LoraModule]:
        return {prefix: LoraModule(0, self.inputs, Shard.whole(self.out_features))}

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        place = self.storage.place(self.weight, range(self.out_features), self.in_features)
        shape = (self.out_features, self.inputs.total)
        yield sharded_entry(f"{prefix}.weight", self.weight, place, shape, 1, self.inputs, self.storage.held)
        if self.bias is not None:
            outputs = Shard.whole(self.out_features)
            yield sharded_entry(f"{prefix}.bias", self.bias, ViewPlace(self.bias), (outputs.total,), 0, outputs)


def plain_linears(model: Layer) -> dict[str, str]:
    """Return the projections that are held as sent although a format was asked for, by name, and why.

    In names `*` stands for the number of a layer.
    """
    linears = {name: layer for name, layer in model.named_layers() if isinstance(layer, Linear | MergedLinear)}
    return {
        re.sub(r"\d+", "*", name): layer.storage.plain_reason
        for name, layer in linears.items()
        if layer.storage.plain_reason
    }


def row_entry(
    name: str, weight: torch.Tensor, place: Place, rows: Shard, in_features: int, held: HeldFormat | None = None
) -> WeightEntry:
    """Make the entry of a matrix of which this rank has `rows`, at `place`."""
    return sharded_entry(name, weight, place, (rows.total, in_features), 0, rows, held)


def sharded_entry(
    name: str,
    weight: torch.Tensor,
    place: Place,
    shape: tuple[int, ...],
    dim: int,
    shard: Shard,
    held: HeldFormat | None = None,
) -> WeightEntry:
    """Make the entry of a logical tensor of `shape`, of which this rank has `shard` in dimension `dim`, at `place`.

    `held`: the format that `weight` is in, whose values are bfloat16.
    """
    dtype = weight.dtype if held is None else torch.bfloat16
    if shard.is_whole:
        return WeightEntry(name, shape, dtype, lambda: [place], held=held)
    part = ShardPlace(place, dim, shard.start, shard.length, shard.sections)
    return WeightEntry(name, shape, dtype, lambda: [part], held=held)
