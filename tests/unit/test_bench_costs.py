"""Costs of operators against cases counted by hand; what the timer sees."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from rollout.entrypoints.bench.costs import Cost, operator_cost
from rollout.entrypoints.bench.machine import Machine
from rollout.entrypoints.bench.operators import OperatorTimer
from tests.kernels import native_ops

BF16 = torch.bfloat16
MACHINE = Machine(read_bytes_per_s=1e9, bf16_flops_per_s=4e9, fp32_flops_per_s=2e9)


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    native_ops()


def cost(operator: Any, *args: Any, **kwargs: Any) -> Cost:
    return operator_cost(operator, args, kwargs, operator(*args, **kwargs))


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_linear() -> None:
    # 5 rows of 64 in, 5 of 32 out, 32 x 64 weights
    assert cost(torch.ops.lockstep.linear.default, zeros(5, 64), zeros(32, 64)) == Cost(
        bytes_moved=2 * (5 * 64 + 32 * 64 + 5 * 32), flops=2 * 5 * 32 * 64, dtype=BF16
    )


def test_experts_count_those_that_are_used() -> None:
    ids = torch.tensor([[1, 6], [6, 1], [1, 2]])  # 3 of 8 experts
    arguments = (zeros(3, 64), ids, zeros(3, 2), zeros(8, 64, 64), zeros(8, 64, 32))
    one_expert = 64 * 64 + 64 * 32
    activations = 2 * (3 * 64 + 3 * 64) + 3 * 2 * (8 + 2)  # in and out, ids and weights
    assert cost(torch.ops.lockstep.fused_experts.default, *arguments) == Cost(
        bytes_moved=3 * 2 * one_expert + activations, flops=2 * 6 * one_expert, dtype=BF16
    )


def test_attention_counts_what_each_query_sees() -> None:
    heads, kv_heads, head_size = 4, 2, 16
    pool = zeros(64, kv_heads, head_size, dtype=torch.float32)
    table = torch.arange(64).view(2, 32)
    query_lens, kv_lens = torch.tensor([3, 1]), torch.tensor([10, 20])
    q = zeros(4, heads, head_size, dtype=torch.float32)
    lengths = (torch.tensor([0, 1]), query_lens, kv_lens)
    result = cost(torch.ops.lockstep.paged_attention.default, q, pool, pool, table, *lengths, 1.0)
    positions_seen = 8 + 9 + 10 + 20
    assert result.flops == positions_seen * heads * 2 * (2 * head_size)
    kv_read = 30 * 2 * kv_heads * head_size * 4
    assert result.bytes_moved == kv_read + 30 * 8 + 2 * q.nbytes + 3 * 2 * 8
    assert result.dtype == torch.float32


def test_storing_kv_counts_the_slots_that_are_written() -> None:
    tokens, heads, kv_heads, head_size = 3, 4, 2, 16
    pool, angles = zeros(1000, kv_heads, head_size), zeros(tokens, 1, head_size)
    qkv, weight = zeros(tokens, (heads + 2 * kv_heads) * head_size), zeros(heads + kv_heads, head_size)
    slots = torch.arange(tokens)
    call = (qkv, weight, angles, angles, pool, pool.clone(), slots, 1e-6)
    result = cost(torch.ops.lockstep.qk_norm_rope_store.default, *call)
    assert result == Cost(2 * qkv.nbytes + weight.nbytes + 2 * angles.nbytes + slots.nbytes, 0, BF16)


def test_operators_of_torch() -> None:
    aten = torch.ops.aten
    table, ids = zeros(1000, 8), torch.tensor([3, 5])
    rows = 2 * 8 * 2
    cases = [
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
