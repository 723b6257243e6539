"""Costs of operators against cases counted by hand, and the operators that the timer sees."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.profile.costs import BYTES, FLOPS, Cost, operator_cost
from benchmarks.profile.machine import Machine
from benchmarks.profile.operators import OperatorTimer
from rollout.kernels.build import SOURCES
from rollout.kernels.operators import OPERATORS
from rollout.kernels.operators.norm_route import RouterRule
from tests.kernels import native_ops
from tests.operators import all_cases, copies, module_of, name_of

pytestmark = pytest.mark.full

BF16 = torch.bfloat16
MACHINE = Machine(read_bytes_per_s=1e9, bf16_flops_per_s=4e9, fp32_flops_per_s=2e9)
# Blocks and layers are composite: a timer sees their parts.
# No matrix product, and every tensor is read or written whole; the last three run when weights are written.  Operators
# of models say so in `tests.operators`.
MOVES_WHAT_IT_IS_GIVEN = {
    f"lockstep::{name}"
    for name in (
        *(
            "sample_rows",
            "score_rows",
            "rest",
            "isa",
            "tiles_agree",
            "empty_packed",
            "pack_rows",
            "unpack_rows",
            "block_sums",
        ),
        *("empty_packed_w8", "pack_rows_w8", "unpack_rows_w8"),
        *("empty_packed_fp8", "pack_rows_fp8", "unpack_rows_fp8"),
        *("empty_packed_int4", "pack_rows_int4", "unpack_rows_int4"),
    )
}


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    native_ops()


def cost(operator: Any, *args: Any, **kwargs: Any) -> Cost:
    return operator_cost(operator, args, kwargs, operator(*args, **kwargs))


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def packed(*lead: int, rows: int, depth: int) -> torch.Tensor:
    return torch.ops.lockstep.empty_packed(list(lead), rows, depth, BF16)


def test_a_linear_layer_costs_what_a_count_by_hand_gives() -> None:
    # 5 rows of 64 in, 5 of 32 out, 32 x 64 weights
    assert cost(torch.ops.lockstep.linear.default, zeros(5, 64), packed(rows=32, depth=64), 32) == Cost(
        bytes_moved=2 * (5 * 64 + 32 * 64 + 5 * 32), flops=2 * 5 * 32 * 64, dtype=BF16
    )


def test_norms_change_the_residual() -> None:
    row = 2 * 5 * 64
    norm = cost(torch.ops.lockstep.add_rms_norm.default, zeros(5, 64), zeros(5, 64), zeros(64), 1e-6)
    assert norm == Cost(bytes_moved=4 * row + 2 * 64, flops=0, dtype=BF16)  # two in, two out
    first = cost(torch.ops.lockstep.add_rms_norm.default, zeros(5, 64), None, zeros(64), 1e-6)
    assert first.bytes_moved == 3 * row + 2 * 64
    weight = packed(rows=32, depth=64)
    linear = cost(torch.ops.lockstep.norm_linear.default, zeros(5, 64), zeros(5, 64), zeros(64), 1e-6, weight, 32)
    assert linear == Cost(3 * row + 2 * 64 + 2 * 32 * 64 + 2 * 5 * 32, 2 * 5 * 32 * 64, BF16)
    rule = RouterRule(32, 4)
    route = cost(torch.ops.lockstep.norm_route.default, zeros(5, 64), None, zeros(64), 1e-6, weight, *rule)
    outputs = row + 5 * 4 * (2 + 8)
    assert route == Cost(2 * row + 2 * 64 + 2 * 32 * 64 + outputs, 2 * 5 * 32 * 64, BF16)


def test_experts_count_those_that_are_used() -> None:
    ids = torch.tensor([[1, 6], [6, 1], [1, 2]])  # 3 of 8 experts
    w13, w2 = packed(8, rows=64, depth=64), packed(8, rows=64, depth=32)
    one_expert = 3 * 64 * 32
    activations = 2 * (3 * 64 + 3 * 64) + 3 * 2 * (8 + 2)  # in and out, ids and weights
    assert cost(torch.ops.lockstep.fused_experts.default, zeros(3, 64), ids, zeros(3, 2), w13, w2, 32) == Cost(
        bytes_moved=3 * 2 * one_expert + activations, flops=2 * 6 * one_expert, dtype=BF16
    )


def test_adapters_of_experts_count_the_ranks_that_rows_use() -> None:
    ids, slots = torch.tensor([[1, 6], [6, 1], [1, 2]]), torch.tensor([0, -1, 0])
    base = (zeros(3, 64), ids, zeros(3, 2), packed(8, rows=64, depth=64), packed(8, rows=64, depth=32), 32)
    matrices = zeros(8, 2, 2, 64, 4), zeros(8, 2, 4, 64), zeros(8, 2, 32, 4), zeros(8, 2, 4, 64)
    ranks = torch.zeros(8, 2, 3, dtype=torch.int64)
    ranks[1, 0], ranks[2, 0], ranks[6, 1] = torch.tensor([4, 3, 2]), torch.tensor([1, 0, 0]), 4
    adapted = torch.ops.lockstep.adapted_experts.default
    with_adapters = cost(adapted, *base, None, None, None, 1.0, slots, *matrices, ranks)
    without = cost(torch.ops.lockstep.fused_experts.default, *base)
    assert with_adapters.flops - without.flops == 2 * (64 + 32) * (9 + 9 + 1)  # expert 1 of two rows, expert 2 of one
    assert with_adapters.bytes_moved - without.bytes_moved == 2 * (64 + 32) * (9 + 1)


def test_experts_of_other_ranks_cost_nothing() -> None:
    """Their ids are below 0, or beyond the experts that are stored.  Operators on CUDA take them, this one does not."""
    ids, slots = torch.tensor([[1, -7], [9, -1]]), torch.tensor([0, 0])
    base = (zeros(2, 64), ids, zeros(2, 2), packed(8, rows=64, depth=64), packed(8, rows=64, depth=32), 32)
    matrices = zeros(8, 1, 2, 64, 4), zeros(8, 1, 4, 64), zeros(8, 1, 32, 4), zeros(8, 1, 4, 64)
    ranks = torch.full((8, 1, 3), 2)
    result, rest = zeros(2, 64), (None, None, None, 1.0, slots, *matrices, ranks)
    plain = operator_cost(torch.ops.lockstep.fused_experts.default, base, {}, result)
    assert plain.flops == 2 * 3 * 64 * 32
    assert plain.bytes_moved == 2 * 3 * 64 * 32 + 2 * (2 * 64 + 2 * 64) + 2 * 2 * (8 + 2)
    adapted = operator_cost(torch.ops.lockstep.adapted_experts.default, (*base, *rest), {}, result)
    assert adapted.flops - plain.flops == 2 * (64 + 32) * 6
    assert adapted.bytes_moved - plain.bytes_moved == 2 * (64 + 32) * 6


def test_adapters_count_those_that_are_used() -> None:
    ranks, slots = torch.tensor([[4, 2], [1, 0]]), torch.tensor([0, -1, 0])
    a, b = zeros(2, 2, 12, 4), zeros(2, 4, 8)  # parts of 6 and 2 columns
    one = cost(torch.ops.lockstep.add_lora.default, zeros(3, 8), zeros(3, 12), slots, a, b, ranks, [0, 6, 8])
    activations = 2 * (3 * 12 + 2 * 3 * 8) + 3 * 8
    assert one.flops == 2 * 2 * (4 * (12 + 6) + 2 * (12 + 2))
    assert one.bytes_moved == 2 * (4 * (12 + 6) + 2 * (12 + 2)) + activations
    a, b = zeros(2, 3, 5, 4), zeros(2, 1, 4, 7)  # three heads, which share B
    given = (zeros(3, 3, 8), zeros(3, 3 * 6), slots, a, b, ranks[:, 1:], 3)
    assert cost(torch.ops.lockstep.add_head_lora.default, *given) == Cost(
        bytes_moved=2 * (3 * 5 * 4 + 4 * 7) // 2 + 2 * (3 * 18 + 2 * 3 * 24) + 3 * 8,
        flops=2 * 2 * 2 * 3 * (5 + 7),
        dtype=BF16,
    )


def test_padding_is_moved_and_not_computed() -> None:
    w13, w2 = packed(2, rows=32, depth=40), packed(2, rows=40, depth=10)
    result = cost(torch.ops.lockstep.fused_experts.default, zeros(1, 40), torch.tensor([[0]]), None, w13, w2, 10)
    assert result.flops == 2 * 3 * 40 * 10
    assert result.bytes_moved == (w13.nbytes + w2.nbytes) // 2 + 2 * 40 + 8 + 2 * 40


def test_attention_counts_what_each_query_sees() -> None:
    heads, kv_heads, head_size = 4, 2, 16
    pool = zeros(64, kv_heads, head_size, dtype=torch.float32)
    table = torch.arange(64).view(2, 32)
    query_lens, kv_lens = torch.tensor([3, 1]), torch.tensor([10, 20])
    q = zeros(4, heads, head_size, dtype=torch.float32)
    lengths = (torch.tensor([0, 1]), query_lens, kv_lens)
    result = cost(torch.ops.lockstep.paged_attention.default, q, pool, pool.clone(), table, *lengths, 1.0)
    positions_seen = 8 + 9 + 10 + 20
    assert result.flops == positions_seen * heads * 2 * (2 * head_size)
    kv_read = 30 * 2 * kv_heads * head_size * 4
    assert result.bytes_moved == kv_read + 30 * 8 + 2 * q.nbytes + 3 * 2 * 8
    assert result.dtype == torch.float32


def test_attention_over_a_window_and_over_latents() -> None:
    table, lengths = torch.arange(64).view(2, 32), (torch.tensor([0, 1]), torch.tensor([3, 1]), torch.tensor([10, 20]))
    pool = zeros(64, 1, 24)
    q = zeros(4, 2, 24)
    result = cost(torch.ops.lockstep.paged_attention.default, q, pool, pool[..., :16], table, *lengths, 1.0, 4)
    assert result.flops == (4 + 4 + 4 + 4) * 2 * 2 * (24 + 16)
    positions = (4 + 2) + 4
    assert result.bytes_moved == positions * (24 * 2 + 8) + q.nbytes + 4 * 2 * 16 * 2 + 3 * 2 * 8


def test_latents_and_states_count_the_rows_that_are_touched() -> None:
    tokens, heads, nope, turned, rank, value = 3, 2, 4, 2, 8, 6
    query, latent, angles = (
        zeros(tokens, heads * (nope + turned)),
        zeros(tokens, rank + turned),
        zeros(tokens, 2, turned),
    )
    weight, norm, slots = zeros(heads * (nope + value), rank), zeros(rank), torch.arange(tokens)
    call: tuple[Any, ...] = (query, latent, norm, 1e-6, weight, heads, angles, zeros(1000, 1, rank + turned), slots)
    result = operator_cost(torch.ops.lockstep.latent_query_store.default, call, {}, zeros(tokens, heads, rank + turned))
    moved = [query, latent, latent, norm, weight, angles, slots, zeros(tokens, heads, rank + turned)]
    assert result == Cost(sum(tensor.nbytes for tensor in moved), 2 * tokens * heads * nope * rank, BF16)
    means = zeros(tokens, heads * rank)
    call = (means, weight, heads, value)
    result = operator_cost(torch.ops.lockstep.latent_values.default, call, {}, zeros(tokens, heads * value))
    assert result.flops == 2 * tokens * heads * rank * value
    projected, small = zeros(tokens, 40), zeros(4)
    conv, state = zeros(100, 3, 24), zeros(100, 2, 4, 8, dtype=torch.float32)
    operands = (torch.tensor([2, 1]), torch.arange(2), torch.arange(2), torch.tensor([[0, 1, 7]]))
    call = (projected, zeros(4, 24), small, small, small, 1e-6, conv, state, *operands)
    out = zeros(tokens, 16)
    result = operator_cost(torch.ops.lockstep.gated_delta.default, call, {}, out)
    moved = [projected, zeros(4, 24), small, small, small, *operands, out]
    row = conv[0].nbytes + state[0].nbytes
    assert result == Cost(5 * row + sum(tensor.nbytes for tensor in moved), 7 * tokens * 2 * 4 * 8, BF16)


def test_storing_kv_counts_the_slots_that_are_written() -> None:
    tokens, heads, kv_heads, head_size = 3, 4, 2, 16
    pool, angles = zeros(1000, kv_heads, head_size), zeros(tokens, 2, head_size)
    qkv, weight = zeros(tokens, (heads + 2 * kv_heads) * head_size), zeros(heads + kv_heads, head_size)
    slots = torch.arange(tokens)
    call = (qkv, weight, angles, pool, pool.clone(), slots, 1e-6)
    result = cost(torch.ops.lockstep.qk_norm_rope_store.default, *call)
    assert result == Cost(2 * qkv.nbytes + weight.nbytes + angles.nbytes + slots.nbytes, 0, BF16)


def test_operators_that_touch_a_part_and_those_of_torch() -> None:
    aten = torch.ops.aten
    table, ids = zeros(1000, 8), torch.tensor([3, 5])
    rows = 2 * 8 * 2
    cases = [
        (torch.ops.lockstep.matrix_rows.default, (packed(rows=100, depth=8), ids, 8), 2 * rows + ids.nbytes, 0),
        (aten.embedding.default, (table, ids), 2 * rows + ids.nbytes, 0),
        (aten.index.Tensor, (table, [ids]), 2 * rows + ids.nbytes, 0),
        (aten.index_put_.default, (table, [ids], zeros(2, 8)), 2 * rows + ids.nbytes, 0),
        (aten.index_copy_.default, (table, 0, ids, zeros(2, 8)), 2 * rows + ids.nbytes, 0),
        (aten.add_.Tensor, (zeros(2, 8), zeros(2, 8)), 3 * rows, 0),
        (aten.copy_.default, (zeros(2, 8), zeros(2, 8)), 2 * rows, 0),
        (aten.cat.default, ([zeros(2, 8), zeros(2, 8)],), 4 * rows, 0),
        (aten.view.default, (table, [8000]), 0, 0),
        (aten.empty.memory_format, ([1000],), 0, 0),
        (aten.mm.default, (zeros(2, 8), zeros(8, 4)), 2 * (2 * 8 + 8 * 4 + 2 * 4), 2 * 2 * 8 * 4),
    ]
    for operator, args, bytes_moved, flops in cases:
        got = cost(operator, *args)
        assert (got.bytes_moved, got.flops) == (bytes_moved, flops), operator


def test_roofline_is_the_slower_of_bytes_and_flops() -> None:
    assert MACHINE.least_seconds(10**9, 10**9, BF16) == 1.0
    assert MACHINE.least_seconds(10**9, 8 * 10**9, BF16) == 2.0
    assert MACHINE.least_seconds(10**9, 8 * 10**9, torch.float32) == 4.0


def test_timer_takes_calls_apart_and_starts_anew() -> None:
    a = torch.randn(300, 300)
    timer = OperatorTimer(MACHINE)
    with timer:
        start = time.perf_counter()
        for _ in range(5):
            a @ a
        seconds = time.perf_counter() - start
        a + a
    a + a  # not watched
    uses = timer.take()
    assert {name: use.calls for name, use in uses.items()} == {"aten.mm": 5, "aten.add": 1}
    assert 0 < uses["aten.mm"].seconds < seconds
    assert uses["aten.mm"].flops == 5 * 2 * 300**3
    assert uses["aten.mm"].least_seconds == pytest.approx(5 * 2 * 300**3 / 2e9)
    assert uses["aten.add"].least_seconds == pytest.approx(3 * a.nbytes / 1e9)
    assert timer.take() == {}


def test_every_compiled_operator_has_its_costs_or_is_known_to_need_none() -> None:
    """An operator that is new in the sources must be entered: products of matrices would go uncounted."""
    sources = "".join(path.read_text() for path in SOURCES.glob("*.cpp"))
    names = [*OPERATORS, *re.findall(r'm\.def\(\s*"(\w+)[("]', sources)]
    defined = {f"lockstep::{name}" for name in names}
    assert len(defined) > 8
    of_models = {f"lockstep::{name}" for name in OPERATORS if costs_what_it_is_given(name)}
    assert not defined - set(FLOPS) - set(BYTES) - MOVES_WHAT_IT_IS_GIVEN - of_models
    assert not of_models & (set(FLOPS) | set(BYTES))


def costs_what_it_is_given(name: str) -> bool:
    return getattr(module_of(name), "COSTS_WHAT_IT_IS_GIVEN", False)


@pytest.mark.parametrize("case", all_cases())
def test_an_operator_without_flops_multiplies_no_matrices(case: str) -> None:
    """torch counts the products of matrices of the plain form."""
    one = OPERATORS[name_of(case)]
    with FlopCounterMode(display=False) as counter:
        one.plain(*copies(all_cases()[case]).values())
    assert counter.get_total_flops() == 0 or not costs_what_it_is_given(one.name)
