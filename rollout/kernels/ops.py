"""`Ops`: the operators that a model computes with, and the way it stores its matrices.

A model is given an `Ops` when it is built and hands it to its layers.

Shapes: O output features, D input features, P physical experts, I expert intermediate, H heads, R size of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from rollout.core.errors import StartupError
from rollout.kernels.held_places import HELD_FORMS, HeldForm
from rollout.kernels.operators import OPERATORS
from rollout.kernels.operators.fused_experts import ExpertOutputs
from rollout.kernels.places import AbsorbedPlace, LatentSizes, PackedPlace, Place, ViewPlace
from rollout.kernels.row_places import ROW_FORMS, RowsPlace
from weight_sync.held_format import HeldFormat

ExpertPart = Literal["gate_proj", "up_proj", "down_proj"]
COMPILED_DTYPES = (torch.bfloat16, torch.float32)
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROW_BLOCK = 16  # rows of a packed projection that lie together; gate and up projections alternate by such blocks


class RowMajor:
    """Plain row-major matrices: gate rows before up rows.

    `experts_held` is the format in which matrices of experts are held; None: as they are sent.  `linears` is the form
    of projections, if they are held in one.
    """

    name = "row-major"
    experts_held: HeldFormat | None = None
    linears: HeldForm | None = None

    def empty_matrix(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Make the storage of a matrix [O, D]."""
        return torch.empty(out_features, in_features, dtype=dtype, device=device)

    def matrix_place(self, weight: torch.Tensor, rows: range, in_features: int) -> Place:
        """Return the place of the logical rows `rows` (step 1): content [len(rows), D]."""
        return ViewPlace(weight[rows.start : rows.stop])

    def empty_experts(
        self, experts: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the storage `w13` of gate and up projections [P, I, D] each, and `w2` of down projections [P, D, I]."""
        w13 = torch.empty(experts, 2 * inner, hidden, dtype=dtype, device=device)
        return w13, torch.empty(experts, hidden, inner, dtype=dtype, device=device)

    def expert_place(
        self, w13: torch.Tensor, w2: torch.Tensor, part: ExpertPart, physical_id: int, inner: int, hidden: int
    ) -> Place:
        """Return the place of one projection of one expert: content [I, D], or [D, I] for the down projection."""
        if part == "down_proj":
            return ViewPlace(w2[physical_id])
        return ViewPlace(w13[physical_id, :inner] if part == "gate_proj" else w13[physical_id, inner:])

    def empty_latent(
        self, heads: int, sizes: LatentSizes, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Make the storage of the matrix [H (nope + v), R] that makes keys and values of a latent."""
        return torch.empty(heads * (sizes.nope + sizes.value), sizes.rank, dtype=dtype, device=device)

    def latent_place(self, weight: torch.Tensor, sizes: LatentSizes) -> Place:
        """Return the place of the whole matrix: content [H (nope + v), R], each head's rows for keys first."""
        return ViewPlace(weight)


class RowMajorHeld(RowMajor):
    """Plain matrices, the ones of experts and projections in a form of `ROW_FORMS`, whose values have dtype `dtype`."""

    def __init__(self, form: str, dtype: torch.dtype, device: torch.device | str) -> None:
        self.name = f"row-major-{form}"
        self._form, self._dtype, self._device = ROW_FORMS[form], dtype, device
        self.experts_held = self._form.held
        self.linears = HeldForm(self._form.held, self._empty_linear, self._linear_place)

    def empty_experts(
        self, experts: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        empty = self._form.empty
        return empty((experts, 2 * inner), hidden, device), empty((experts, hidden), inner, device)

    def expert_place(
        self, w13: torch.Tensor, w2: torch.Tensor, part: ExpertPart, physical_id: int, inner: int, hidden: int
    ) -> Place:
        if part == "down_proj":
            return RowsPlace(self._form, w2[physical_id], inner, self._dtype)
        rows = w13[physical_id, :inner] if part == "gate_proj" else w13[physical_id, inner:]
        return RowsPlace(self._form, rows, hidden, self._dtype)

    def _empty_linear(self, lead: list[int], rows: int, columns: int) -> torch.Tensor:
        return self._form.empty((*lead, rows), columns, self._device)

    def _linear_place(self, weight: torch.Tensor, rows: range, columns: int, step: int, offset: int) -> Place:
        assert (step, offset) == (1, 0), "rows of a projection lie together"
        return RowsPlace(self._form, weight[rows.start : rows.stop], columns, self._dtype)


class Packed(RowMajor):
    """Matrices packed for the compiled CPU operators (`csrc/packed.h`) as they are written; no second copy is kept."""

    name = "packed"

    def empty_matrix(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.lockstep.empty_packed([], out_features, in_features, dtype)
        return packed

    def matrix_place(self, weight: torch.Tensor, rows: range, in_features: int) -> Place:
        return PackedPlace(weight, rows, in_features)

    def empty_experts(
        self, experts: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both, empty_packed = 2 * _ROW_BLOCK * -(-inner // _ROW_BLOCK), torch.ops.lockstep.empty_packed
        return empty_packed([experts], both, hidden, dtype), empty_packed([experts], hidden, inner, dtype)

    def expert_place(
        self, w13: torch.Tensor, w2: torch.Tensor, part: ExpertPart, physical_id: int, inner: int, hidden: int
    ) -> Place:
        if part == "down_proj":
            return PackedPlace(w2[physical_id], range(hidden), inner)
        return PackedPlace(w13[physical_id], range(inner), hidden, step=2, offset=int(part == "up_proj"))

    def empty_latent(
        self, heads: int, sizes: LatentSizes, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        keys, values = (
            torch.ops.lockstep.empty_packed([0], *shape, dtype).shape[1:].numel()
            for shape in (sizes.key_matrix, sizes.value_matrix)
        )
        return torch.zeros(heads, keys + values, dtype=dtype, device=device)

    def latent_place(self, weight: torch.Tensor, sizes: LatentSizes) -> Place:
        return AbsorbedPlace(weight, sizes)


class PackedHeld(Packed):
    """Packed matrices, the ones of experts, of projections or of both in a form of `HELD_FORMS`; for bfloat16."""

    def __init__(self, experts: str = "plain", linears: str = "plain") -> None:
        self.name = f"packed-{experts}-{linears}"
        self._experts = None if experts == "plain" else HELD_FORMS[experts]
        self.experts_held = None if self._experts is None else self._experts.held
        if linears != "plain":
            form = HELD_FORMS[linears]
            self.linears = replace(form, held=replace(form.held, flag=f"--cpu-linear-format {linears}"))

    def empty_experts(
        self, experts: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._experts is None:
            return super().empty_experts(experts, inner, hidden, dtype, device)
        assert dtype == torch.bfloat16, dtype
        both, empty = 2 * _ROW_BLOCK * -(-inner // _ROW_BLOCK), self._experts.empty
        return empty([experts], both, hidden), empty([experts], hidden, inner)

    def expert_place(
        self, w13: torch.Tensor, w2: torch.Tensor, part: ExpertPart, physical_id: int, inner: int, hidden: int
    ) -> Place:
        if self._experts is None:
            return super().expert_place(w13, w2, part, physical_id, inner, hidden)
        if part == "down_proj":
            return self._experts.place(w2[physical_id], range(hidden), inner, 1, 0)
        return self._experts.place(w13[physical_id], range(inner), hidden, 2, int(part == "up_proj"))


class DeferredSum(NamedTuple):
    """`outputs` and `adapted`: `fused_experts` and `adapted_experts` with weights, but for their sum.

    `norm`: `add_rms_norm` that adds this sum itself.
    """

    outputs: Callable[..., ExpertOutputs]
    adapted: Callable[..., ExpertOutputs]
    norm: Callable[..., torch.Tensor]


class Ops:
    """The operators of `rollout.kernels.operators`, which has their arguments, as attributes; and their storage.

    `batch_invariant`: a row of every result has the same bits in every batch and with any number of threads.
    `graph_safe`: no operator waits for the device, or allocates by numbers there, so that a step can be captured.
    `takes_empty_slots`: ids below 0 or from P on are slots of `fused_experts` without an expert.  Their output is zero,
    their weight is not used.  It and `adapted_experts` then take a guess of the number of other slots, `expected`.
    `packed_experts`: the function of `gpu/packed_experts.py`, if there is one.
    `deferred_sum`: the next norm can sum the outputs of experts.  `rest` lets threads that look for the next operator
    sleep: call it where no operator follows soon.
    """

    def __init__(
        self,
        operators: Mapping[str, Callable[..., Any]],
        storage: RowMajor,
        *,
        batch_invariant: bool,
        graph_safe: bool = False,
        takes_empty_slots: bool = False,
        packed_experts: Callable[..., torch.Tensor] | None = None,
        deferred_sum: DeferredSum | None = None,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        assert operators.keys() == OPERATORS.keys(), operators.keys() ^ OPERATORS.keys()
        self.storage, self.rest = storage, rest
        self.packed_experts, self.deferred_sum = packed_experts, deferred_sum
        self.batch_invariant, self.graph_safe, self.takes_empty_slots = batch_invariant, graph_safe, takes_empty_slots
        vars(self).update(operators)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]:
            """Return the operator of this name."""

    def replace(self, **changes: Any) -> Ops:
        """Return a copy with these attributes changed."""
        unknown = changes.keys() - vars(self).keys()
        assert not unknown, unknown
        made = copy(self)
        vars(made).update(changes)
        return made


def plain_ops() -> Ops:
    """Return the operators in plain torch, called directly."""
    return Ops({name: one.plain for name, one in OPERATORS.items()}, RowMajor(), batch_invariant=False)


def compiled_ops(storage: RowMajor | None = None) -> Ops:
    """Return torch's registry with the compiled CPU operators in it (`load_kernels`), for bfloat16 and float32."""
    rest = torch.ops.lockstep.rest.default
    return Ops(_registered(), storage or Packed(), batch_invariant=True, graph_safe=True, rest=rest)


def gpu_ops(storage: RowMajor | None = None, deterministic: bool = False) -> Ops:
    """Return torch's registry with the Triton kernels in it (`load_gpu_kernels`), for `GPU_DTYPES`.

    A library computes the matrix products of dense layers.  With `deterministic` a kernel of fixed tiles does, and the
    operators are batch invariant.
    """
    packed: Callable[..., torch.Tensor] = import_module("rollout.kernels.gpu.packed_experts").packed_experts
    operators = _registered()
    operators |= {name: _with_guess(operators[name], name) for name in ("fused_experts", "adapted_experts")}
    if deterministic:
        fixed = import_module("rollout.kernels.gpu.fixed_product")
        operators |= {"linear": fixed.linear, "norm_linear": fixed.norm_linear}
    return Ops(
        operators,
        storage or RowMajor(),
        batch_invariant=deterministic,
        graph_safe=True,
        takes_empty_slots=True,
        packed_experts=packed,
        deferred_sum=gpu_deferred_sum(),
    )


def _with_guess(registered: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return an operator that takes `expected`, which the registry's schema has not: then it calls the function."""
    form = getattr(import_module(f"rollout.kernels.gpu.{name}"), name)

    def call(*given: Any, expected: int | None = None) -> Any:
        return registered(*given) if expected is None else form(*given, expected=expected)

    return call


def gpu_deferred_sum() -> DeferredSum:
    """Return the Triton functions.  Raises `ImportError` where triton cannot be used."""
    outputs = import_module("rollout.kernels.gpu.fused_experts").expert_outputs
    adapted = import_module("rollout.kernels.gpu.adapted_experts").adapted_outputs
    return DeferredSum(outputs, adapted, import_module("rollout.kernels.gpu.experts_norm").experts_norm)


def _registered() -> dict[str, Callable[..., Any]]:
    return {name: one.registered for name, one in OPERATORS.items()}


def plain_torch_reason(ops: Ops, reason: str, dtype: torch.dtype) -> str:
    """Return why these operators are plain torch; "" if they are the device's own.

    `reason`: why the device's own are not loaded.
    """
    return "" if ops.graph_safe else reason or f"there are no compiled operators for {dtype}"


def select_ops(
    dtype: torch.dtype,
    device: torch.device | str,
    kernels_available: bool,
    weight_format: str = "plain",
    linear_format: str = "plain",
    quantization: str | None = None,
    deterministic: bool = False,
) -> Ops:
    """Return the kernels where they exist for this dtype and device, else plain torch.

    `kernels_available`: this device's kernels are loaded.  `weight_format`: "plain", or one of `HELD_FORMS` for experts
    on a CPU.  `linear_format`: the same for projections.  `quantization`: None, or one of `ROW_FORMS` for experts and
    projections on CUDA.  `deterministic`: on CUDA, take the batch invariant operators.  Raises `StartupError` for a
    format without operators for the dtype.
    """
    kind = torch.device(device).type
    compiled = kernels_available and dtype in COMPILED_DTYPES and kind == "cpu"
    triton = kernels_available and dtype in GPU_DTYPES and kind == "cuda"
    for flag, form in (("--cpu-weight-format", weight_format), ("--cpu-linear-format", linear_format)):
        if form != "plain" and (not compiled or dtype != torch.bfloat16):
            raise StartupError(f"{flag} {form} needs the compiled CPU operators and --dtype bfloat16")
    if quantization is not None:
        if not triton or dtype != torch.bfloat16:
            raise StartupError(f"--quantization {quantization} needs the Triton kernels on CUDA and --dtype bfloat16")
        return gpu_ops(RowMajorHeld(quantization, dtype, device), deterministic)
    if (weight_format, linear_format) != ("plain", "plain"):
        return compiled_ops(PackedHeld(weight_format, linear_format))
    if compiled:
        return compiled_ops()
    return gpu_ops(deterministic=deterministic) if triton else plain_ops()
