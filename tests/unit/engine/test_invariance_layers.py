"""Each layer by itself on one and two threads: a row's result has the same bits alone, among hundreds, in any order.

Sizes are large and odd: torch's elementwise functions cut a tensor of more than 32768 elements into one part a thread.
Other instructions compute the elements at a cut.

Shapes: N rows, D hidden.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rollout.attention.base import PagedOperands
from rollout.attention.native_cpu import NativeCpuBackend
from rollout.kernels.operators.silu_and_mul import silu_and_mul
from rollout.layers.context import ForwardContext
from rollout.memory.kv_pool import KVPool
from rollout.model.decoder import DecoderForCausalLM
from tests.forward_harness import ForwardHarness
from tests.invariance import compute_threads
from tests.kernels import Rows, native_ops, rows_are_independent
from tests.model_zoo import load_tiny, tiny_checkpoint

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
NUM_ROWS = 601
HIDDEN = 53
INNER = 131


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": 67, "experts": 19, "layers": 2}
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", **sizes)


def _rows(dtype: torch.dtype, size: int = HIDDEN, seed: int = 0) -> torch.Tensor:
    return torch.randn(NUM_ROWS, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _same_for_any_number_of_rows(compute: Rows) -> bool:
    """Check that two threads compute the same bits for many numbers of rows, whose cuts fall in many places."""
    whole = compute(torch.arange(NUM_ROWS))
    with compute_threads(2):
        return all(torch.equal(compute(torch.arange(n)), whole[:n]) for n in range(301, NUM_ROWS, 10))


def _computations(model: DecoderForCausalLM, dtype: torch.dtype) -> dict[str, Rows]:
    """Return every layer as a function of rows of one input.

    Norms and sums with the residual are part of the layer that follows them.
    """
    harness = ForwardHarness(model, backend="native_cpu")
    context = ForwardContext(harness.batch({0: [1]}, {}), harness.attention, [])
    hidden_ND, residual_ND, positions_N = _rows(dtype), _rows(dtype, seed=1), 41 * torch.arange(NUM_ROWS) % 512
    dense, sparse = model.model.layers
    norm = dense.input_layernorm

    def attended_alone(rows: torch.Tensor) -> torch.Tensor:
        """Attend from each row at position 0 of a sequence of its own."""
        num_rows = len(rows)
        pool = KVPool(num_rows, model.kv_layers[:1], dtype)
        (rotary,) = model.model.rotary_tables.values()
        attention, angles = NativeCpuBackend(pool), rotary.angles(positions_N[rows])
        numbers, ones = torch.arange(num_rows), torch.ones(num_rows, dtype=torch.int64)
        attention.operands = PagedOperands(numbers[:, None], numbers, ones, ones)
        batch = dataclasses.replace(context.batch, out_cache_loc=numbers)
        out = dense.self_attn(residual_ND[rows], hidden_ND[rows], norm, angles, ForwardContext(batch, attention))
        return torch.cat((out, *(part[0][:num_rows].flatten(1) for part in (pool.k, pool.v))), 1)

    def routed(rows: torch.Tensor) -> torch.Tensor:
        normed, weights, ids = sparse.mlp.gate(residual_ND[rows], hidden_ND[rows], norm, context)
        return torch.cat((normed, weights, ids), 1)

    return {
        "embedding": lambda rows: model.model.embed_tokens(positions_N[rows] % 320),
        "attention": attended_alone,
        "dense block": lambda rows: dense.mlp(residual_ND[rows], hidden_ND[rows], norm, context),
        "router": routed,
        "sparse block": lambda rows: sparse.mlp(residual_ND[rows], hidden_ND[rows], norm, context),
        "logits": lambda rows: model.compute_logits(hidden_ND[rows]),
    }


@DTYPES
@torch.inference_mode()
def test_rows_of_every_layer(folder: Path, dtype: torch.dtype) -> None:
    computations = _computations(load_tiny(folder, dtype, ops=native_ops()), dtype)
    for name, compute in computations.items():
        assert rows_are_independent(compute, NUM_ROWS), name
        assert _same_for_any_number_of_rows(compute), name


def test_torch_s_elementwise_functions_fail_the_check() -> None:
    gate_up_N2I = _rows(torch.float32, 2 * INNER)
    assert _same_for_any_number_of_rows(lambda rows: gate_up_N2I[rows] * 2)
    assert not _same_for_any_number_of_rows(lambda rows: silu_and_mul.plain(gate_up_N2I[rows]))


def test_torch_s_products_fail_the_check() -> None:
    weight_OD, hidden_ND = _rows(torch.float32, 300)[:200], _rows(torch.float32, 300)
    assert not rows_are_independent(lambda rows: hidden_ND[rows] @ weight_OD.T, NUM_ROWS)
