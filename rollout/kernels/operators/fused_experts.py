"""`fused_experts`: SwiGLU of expert ids[t, k] on row t [T, K, D], or with weights [T, K] their sum over K in slot order
[T, D].

Biases are w13_bias [P, 2I], gate first, and w2_bias [P, D].  With a limit it is `ClampedSwiGLU`.  Where
`Ops.takes_empty_slots` is true, an id below 0 or from P on is a slot without an expert: its output is zero, its weight
is not used.

The plain form has three ways to apply many experts to many rows, and a rule that picks one:

    padded   one batched matmul over all experts, each padded to the rows of the busiest: fewest calls, best when rows
             are spread evenly and most experts are used
    grouped  `torch.nn.functional.grouped_mm` over rows sorted by expert: no padding, pays per used expert
    looped   one matmul per used expert: as grouped, for every dtype and device

All give each (row, slot) its own unweighted result, so that the caller's sum does not depend on the choice.  The choice
compares estimated times, by rates measured on one machine (`_Rates`): elsewhere it may not be the fastest.

Shapes: R rows, S expert slots of a row, A = R * S assignments, P experts stored here, C rows of the busiest expert,
D hidden, I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from rollout.kernels.operator import Gradient, operator
from rollout.kernels.operators.silu_and_mul import silu_and_mul


@operator(
    "(Tensor hidden, Tensor ids, Tensor? weights, Tensor w13, Tensor w2, int inner_size, Tensor? w13_bias=None, "
    "Tensor? w2_bias=None, float? limit=None, float alpha=1.0) -> Tensor",
    Gradient(flows=("hidden", "weights"), weights=("w13", "w2", "w13_bias", "w2_bias")),
)
def fused_experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    inner_size: int,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
) -> torch.Tensor:
    outputs_TKD = apply_experts(hidden, ids, w13, w2, form=ExpertForm(w13_bias, w2_bias, limit, alpha))
    return outputs_TKD if weights is None else weighted_sum(outputs_TKD, weights)


class ExpertOutputs(NamedTuple):
    """Outputs [T, K, D] of experts `ids` [T, K] that are not yet multiplied by their `weights` [T, K] and summed.

    Slots whose id is none of `num_experts` hold no numbers, and count as zero.
    """

    rows_TKD: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    num_experts: int


def weighted_sum(expert_out_TKD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Sum over K in slot order, products rounded to the dtype of the hidden states as in transformers."""
    return (expert_out_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)


def clamped_swiglu(gate_up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Apply `ClampedSwiGLU` to [..., 2I], gate first, and return [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    gate = gate * torch.sigmoid(gate * alpha)
    return up.clamp(-limit, limit).add_(1).mul_(gate)


@dataclass(frozen=True)
class ExpertForm:
    """Experts' parts apart from two products: biases [P, 2I], gate first, and [P, D]; the limit of `ClampedSwiGLU`."""

    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    limit: float | None = None
    alpha: float = 1.0

    def inner(self, gate_up: torch.Tensor, experts_A: torch.Tensor | None) -> torch.Tensor:
        """Apply bias and activation to the first product [A, 2I], or [P, C, 2I] where `experts_A` is None."""
        gate_up = _biased(gate_up, self.w13_bias, experts_A)
        return silu_and_mul.plain(gate_up) if self.limit is None else clamped_swiglu(gate_up, self.limit, self.alpha)

    def out(self, out: torch.Tensor, experts_A: torch.Tensor | None) -> torch.Tensor:
        """Return the second product [A, D], or [P, C, D], with its bias."""
        return _biased(out, self.w2_bias, experts_A)


def _biased(rows: torch.Tensor, bias: torch.Tensor | None, experts_A: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return rows
    return rows.add_(bias.unsqueeze(1) if experts_A is None else bias.index_select(0, experts_A))


@dataclass(frozen=True)
class _Rates:
    """The speed at which one machine computes, fitted to timings on 2 cores of an AMD EPYC with AVX-512 (torch 2.13).

    They decide between padded and per-expert work on every machine; nothing is measured at run time.
    """

    flops_per_s: float
    batched_bytes_per_s: float  # weights streamed by one batched matmul
    single_bytes_per_s: float  # weights streamed expert by expert
    seconds_per_expert: float  # calls made for each used expert


_HALF = _Rates(350e9, 25e9, 25e9, 35e-6)
_FLOAT = _Rates(200e9, 25e9, 14e9, 35e-6)
_DOUBLE = _Rates(80e9, 25e9, 14e9, 35e-6)
_RATES = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float64: _DOUBLE}

GROUPED_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
}
GROUPED_ALIGNMENT_BYTES = 16


@dataclass(slots=True)
class Assignments:
    """The A = R * S (row, slot) pairs in the order of their experts; pairs of one expert keep their own order."""

    order_A: torch.Tensor  # flat (row, slot) index of each sorted position
    experts_A: torch.Tensor  # expert of each sorted position, ascending
    counts_P: torch.Tensor  # rows of each expert
    num_slots: int

    @property
    def rows_A(self) -> torch.Tensor:
        return self.order_A // self.num_slots

    def unsort(self, positions_A: torch.Tensor) -> torch.Tensor:
        """Turn a place for each sorted position into a place for each flat (row, slot) index."""
        return torch.empty_like(positions_A).index_copy_(0, self.order_A, positions_A)


Strategy = Callable[[torch.Tensor, Assignments, list[int], torch.Tensor, torch.Tensor, ExpertForm], torch.Tensor]


def apply_experts(
    hidden_RD: torch.Tensor,
    ids_RS: torch.Tensor,
    w13_PID: torch.Tensor,
    w2_PDI: torch.Tensor,
    strategy: Strategy | None = None,
    form: ExpertForm | None = None,
) -> torch.Tensor:
    """Apply SwiGLU of expert `ids_RS[r, s]` to row r, unweighted: [R, S, D].

    `w13_PID` [P, 2I, D] holds gate rows, then up rows; `w2_PDI` is [P, D, I].  By default `form` has no biases and does
    not clamp.  The call costs one host synchronisation.
    """
    num_rows, num_slots = ids_RS.shape
    if num_rows == 0:
        return hidden_RD.new_empty(0, num_slots, hidden_RD.shape[1])
    flat_A = ids_RS.flatten()
    order_A = flat_A.argsort(stable=True)
    counts_P = torch.bincount(flat_A, minlength=w13_PID.shape[0])
    assignments = Assignments(order_A, flat_A.index_select(0, order_A), counts_P, num_slots)
    counts = counts_P.tolist()
    if strategy is None:
        strategy = choose_strategy(counts, w2_PDI)
    out_AD = strategy(hidden_RD, assignments, counts, w13_PID, w2_PDI, form or ExpertForm())
    return out_AD.view(num_rows, num_slots, -1)


def choose_strategy(counts: list[int], w2_PDI: torch.Tensor) -> Strategy:
    """Choose the cheapest strategy that this dtype and device have, by a cost of bytes, flops and calls."""
    experts, hidden_size, intermediate = w2_PDI.shape
    rates = _RATES.get(w2_PDI.dtype, _FLOAT)
    weight_numel = 3 * hidden_size * intermediate
    weight_bytes = weight_numel * w2_PDI.element_size()
    seconds_per_row = 2 * weight_numel / rates.flops_per_s
    padded_s = experts * (weight_bytes / rates.batched_bytes_per_s + padded_capacity(max(counts)) * seconds_per_row)
    used = len(counts) - counts.count(0)
    single_s = used * (weight_bytes / rates.single_bytes_per_s + rates.seconds_per_expert)
    single_s += sum(counts) * seconds_per_row
    if padded_s <= single_s and w2_PDI.device.type == "cpu":
        return padded
    return grouped if has_grouped(w2_PDI) else looped


def has_grouped(w2_PDI: torch.Tensor) -> bool:
    """Return whether `grouped_mm` exists for this dtype, device and alignment."""
    row_bytes = [size * w2_PDI.element_size() for size in w2_PDI.shape[1:]]
    aligned = all(size % GROUPED_ALIGNMENT_BYTES == 0 for size in row_bytes)
    return aligned and w2_PDI.dtype in GROUPED_DTYPES.get(w2_PDI.device.type, ())


def padded_capacity(busiest: int) -> int:
    """Round `busiest` up to one of eight sizes per octave.

    The CPU's half-precision matmul compiles a kernel for every new shape, at about a millisecond each.
    """
    step = 1 << max(0, busiest.bit_length() - 4)
    return -(-busiest // step) * step


def padded(
    hidden_RD: torch.Tensor,
    assigned: Assignments,
    counts: list[int],
    w13_PID: torch.Tensor,
    w2_PDI: torch.Tensor,
    form: ExpertForm,
) -> torch.Tensor:
    """Apply every expert to `padded_capacity(C)` rows: its own, then copies of row 0 as padding.  Returns [A, D]."""
    experts, capacity = len(counts), padded_capacity(max(counts))
    starts_P = assigned.counts_P.cumsum(0).sub_(assigned.counts_P)
    # Sorted position a is row a - starts[expert] of its expert, so its place is expert * C + a - starts[expert].
    first_place_P = torch.arange(experts, device=hidden_RD.device).mul_(capacity).sub_(starts_P)
    places_A = first_place_P.index_select(0, assigned.experts_A)
    places_A += torch.arange(places_A.shape[0], device=hidden_RD.device)
    sources = places_A.new_zeros(experts * capacity).index_copy_(0, places_A, assigned.rows_A)
    rows = hidden_RD.index_select(0, sources).view(experts, capacity, -1)
    inner = form.inner(torch.bmm(rows, w13_PID.transpose(1, 2)), None)
    out = form.out(torch.bmm(inner, w2_PDI.transpose(1, 2)), None).reshape(experts * capacity, -1)
    return out.index_select(0, assigned.unsort(places_A))


def grouped(
    hidden_RD: torch.Tensor,
    assigned: Assignments,
    counts: list[int],
    w13_PID: torch.Tensor,
    w2_PDI: torch.Tensor,
    form: ExpertForm,
) -> torch.Tensor:
    """Apply the experts by two grouped matmuls over the sorted rows.  Returns [A, D]."""
    ends_P = assigned.counts_P.cumsum(0).to(torch.int32)
    rows_AD = hidden_RD.index_select(0, assigned.rows_A)
    inner = form.inner(F.grouped_mm(rows_AD, w13_PID.transpose(1, 2), offs=ends_P), assigned.experts_A)
    out_AD = F.grouped_mm(inner, w2_PDI.transpose(1, 2), offs=ends_P)
    return _unsorted(form.out(out_AD, assigned.experts_A), assigned)


def looped(
    hidden_RD: torch.Tensor,
    assigned: Assignments,
    counts: list[int],
    w13_PID: torch.Tensor,
    w2_PDI: torch.Tensor,
    form: ExpertForm,
) -> torch.Tensor:
    """Apply the experts by two matmuls per used expert and one activation for all.  Returns [A, D]."""
    rows = hidden_RD.index_select(0, assigned.rows_A).split(counts)
    gate_up = torch.cat([part @ matrix.t() for part, matrix in zip(rows, w13_PID.unbind(), strict=True) if len(part)])
    inner = form.inner(gate_up, assigned.experts_A).split(counts)
    out_AD = torch.cat([part @ matrix.t() for part, matrix in zip(inner, w2_PDI.unbind(), strict=True) if len(part)])
    return _unsorted(form.out(out_AD, assigned.experts_A), assigned)


def _unsorted(out_AD: torch.Tensor, assigned: Assignments) -> torch.Tensor:
    positions_A = torch.arange(out_AD.shape[0], device=out_AD.device)
    return out_AD.index_select(0, assigned.unsort(positions_A))
