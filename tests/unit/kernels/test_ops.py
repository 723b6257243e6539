"""Every compiled operator against plain torch and float64, at awkward sizes; rows do not depend on one another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rollout.kernels.operators.norm_route import RouterRule
from rollout.kernels.ops import Ops, plain_ops, select_ops
from tests.kernels import angles, error, expert_weights, experts, linear, matrix, native_ops, rows_are_independent
from tests.operators import all_cases, as_stored, copies, name_of

PLAIN = plain_ops()
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
# Rounding errors have the same size as torch's; the order of sums makes single cases a little better or worse.
SLACK = 1.3
EPS = 2e-7  # float32: a unit or two in the last place; lost in bfloat16


@pytest.fixture(scope="module")
def native() -> Ops:
    return native_ops()


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "depth", "outputs"),
    [(1, 1, 1), (1, 256, 512), (3, 33, 5), (5, 50, 31), (6, 64, 4), (13, 96, 33), (49, 31, 40), (100, 260, 70)],
)
def test_linear_is_as_exact_as_torch(native: Ops, dtype: torch.dtype, tokens: int, depth: int, outputs: int) -> None:
    hidden, weight = _randn(tokens, depth, dtype=dtype), _randn(outputs, depth, seed=1, dtype=dtype)
    out, exact = linear(native, hidden, weight), hidden.double() @ weight.double().T
    assert out.dtype == dtype
    assert error(out, exact) <= SLACK * error(linear(PLAIN, hidden, weight), exact) + EPS


def test_linear_of_strided_and_of_no_rows(native: Ops) -> None:
    hidden, weight = _randn(8, 100)[:, 10:74], _randn(7, 64, seed=1)
    torch.testing.assert_close(linear(native, hidden, weight), hidden @ weight.T)
    assert linear(native, hidden[:0], weight).shape == (0, 7)


def _experts_exact(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    gate, up = torch.einsum("td,tkid->tki", hidden.double(), w13.double()[ids]).chunk(2, -1)
    out = torch.einsum("tki,tkdi->tkd", F.silu(gate) * up, w2.double()[ids])
    return (out * weights.double()[..., None]).sum(1)


ROUTINGS = {
    "spread": lambda: torch.stack([torch.randperm(6)[:3] for _ in range(37)]),
    "all to one": lambda: torch.full((59, 1), 4),
    "one token": lambda: torch.tensor([[5, 0, 2, 1]]),
    "an expert twice": lambda: torch.tensor([[3, 3], [1, 3], [0, 0]]),
    "some experts without tokens": lambda: torch.tensor([[2, 0]] * 8 + [[2, 5]]),
}


@DTYPES
@pytest.mark.parametrize("routing", list(ROUTINGS))
@pytest.mark.parametrize(("hidden_size", "inner_size"), [(64, 32), (50, 19), (36, 24), (1, 1)])
def test_experts_are_as_exact_as_torch(
    native: Ops, dtype: torch.dtype, routing: str, hidden_size: int, inner_size: int
) -> None:
    torch.manual_seed(0)
    ids = ROUTINGS[routing]()
    hidden, weights = _randn(len(ids), hidden_size, dtype=dtype), torch.rand(ids.shape).to(dtype)
    w13 = (_randn(6, 2 * inner_size, hidden_size, seed=1) / hidden_size**0.5).to(dtype)
    w2 = (_randn(6, hidden_size, inner_size, seed=2) / inner_size**0.5).to(dtype)
    out, exact = experts(native, hidden, ids, weights, w13, w2), _experts_exact(hidden, ids, weights, w13, w2)
    assert out.dtype == dtype
    assert error(out, exact) <= SLACK * error(experts(PLAIN, hidden, ids, weights, w13, w2), exact) + EPS
    slots, plain_slots = (experts(ops, hidden, ids, None, w13, w2) for ops in (native, PLAIN))
    assert slots.shape == (*ids.shape, hidden_size)
    assert error(slots, plain_slots.double()) < 4 * torch.finfo(dtype).eps
    assert torch.equal(out, experts(native, hidden, ids, weights, w13, w2))


def test_experts_take_an_empty_batch(native: Ops) -> None:
    w13, w2, ids = _randn(2, 6, 4), _randn(2, 4, 3), torch.empty(0, 2, dtype=torch.int64)
    assert experts(native, _randn(0, 4), ids, _randn(0, 2), w13, w2).shape == (0, 4)
    assert experts(native, _randn(0, 4), ids, None, w13, w2).shape == (0, 2, 4)


@pytest.mark.mutant
def test_the_comparison_notices_wrong_experts(native: Ops) -> None:
    torch.manual_seed(0)
    ids, hidden, weights = ROUTINGS["spread"](), _randn(37, 64), torch.rand(37, 3)
    w13, w2 = _randn(6, 64, 64, seed=1) / 8, _randn(6, 64, 32, seed=2) / 6
    exact = _experts_exact(hidden, ids, weights, w13, w2)
    swapped = torch.cat(w13.chunk(2, dim=1)[::-1], dim=1)
    assert error(experts(native, hidden, ids, weights, w13, w2), exact) < 1e-6
    assert error(experts(native, hidden, ids.roll(1, 0), weights, w13, w2), exact) > 0.01
    assert error(experts(native, hidden, ids, weights.roll(1, 1), w13, w2), exact) > 0.01
    assert error(experts(native, hidden, ids, weights, swapped, w2), exact) > 0.01


def test_a_row_of_nans_stays_alone(native: Ops) -> None:
    hidden, weight = _randn(8, 40), _randn(30, 40, seed=1)
    hidden[3] = float("nan")
    w13, w2 = _randn(2, 20, 40, seed=2), _randn(2, 40, 10, seed=3)
    ids = torch.tensor([[0, 1]]).expand(8, 2)
    for out in (
        linear(native, hidden, weight),
        native.add_rms_norm(hidden.clone(), None, torch.ones(40), 1e-6),
        experts(native, hidden, ids, torch.ones(8, 2), w13, w2),
    ):
        assert out[3].isnan().all()
        assert out[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()


OFFSETS = pytest.mark.parametrize("offset", [None, 0.0, 1.0])


@DTYPES
@OFFSETS
@pytest.mark.parametrize(("tokens", "size"), [(1, 16), (9, 50), (33, 256), (64, 1000), (0, 8)])
def test_norms_have_nearly_all_bits_of_torch(
    native: Ops, dtype: torch.dtype, tokens: int, size: int, offset: float | None
) -> None:
    """In bfloat16 the rounding almost always hides the order of the sum of squares."""
    hidden, weight = 3 * _randn(tokens, size, dtype=dtype), _randn(size, seed=1, dtype=dtype)
    residual = _randn(tokens, size, seed=2, dtype=dtype)
    plain_residual = residual.clone()
    pairs = [
        (
            native.add_rms_norm(hidden, None, weight, 1e-6, offset),
            PLAIN.add_rms_norm(hidden, None, weight, 1e-6, offset),
        ),
        (
            native.add_rms_norm(residual, hidden, weight, 1e-6, offset),
            PLAIN.add_rms_norm(plain_residual, hidden, weight, 1e-6, offset),
        ),
    ]
    assert torch.equal(residual, plain_residual)
    for out, expected in pairs:
        torch.testing.assert_close(out, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)
        assert dtype == torch.float32 or tokens == 0 or (out == expected).float().mean() > 0.995


def test_an_offset_of_the_weight_is_rounded_once(native: Ops) -> None:
    hidden, weight = 3 * _randn(64, 96, dtype=torch.bfloat16), _randn(96, seed=1, dtype=torch.bfloat16)
    exact = torch.nn.functional.rms_norm(hidden.double(), (96,), None, 1e-6)
    for ops in (native, PLAIN):
        for offset in (0.0, 1.0):
            once = (exact * (offset + weight.double())).to(torch.bfloat16)
            assert (ops.add_rms_norm(hidden.clone(), None, weight, 1e-6, offset) == once).float().mean() > 0.99
        twice = ops.add_rms_norm(hidden.clone(), None, weight, 1e-6)
        assert (twice == (exact * weight.double()).to(torch.bfloat16)).float().mean() < 0.9


@DTYPES
@OFFSETS
@pytest.mark.parametrize(("head_dim", "rotated"), [(2, 2), (16, 16), (24, 24), (64, 64), (128, 128), (64, 16), (24, 6)])
@pytest.mark.parametrize("tokens", [0, 1, 21])
def test_heads_go_to_their_slots(
    native: Ops, dtype: torch.dtype, head_dim: int, rotated: int, tokens: int, offset: float | None
) -> None:
    heads, kv_heads, num_slots = 6, 2, 40
    qkv = _randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    weight = _randn(heads + kv_heads, head_dim, seed=1, dtype=dtype)
    rotary = angles(rotated, 1000, dtype, 37 * torch.arange(tokens))
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(2))[:tokens]
    pools = [torch.full((num_slots, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(4)]
    query = native.qk_norm_rope_store(qkv, weight, rotary, pools[0], pools[1], slots, 1e-6, offset)
    expected = PLAIN.qk_norm_rope_store(qkv, weight, rotary, pools[2], pools[3], slots, 1e-6, offset)
    assert query.shape == (tokens, heads, head_dim)
    assert torch.equal(pools[1], pools[3])
    for out, right in ((query, expected), (pools[0], pools[2])):
        # The two products of the rotation may cancel: the error is relative to their size, not to the sum.
        torch.testing.assert_close(out, right, rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
        assert dtype == torch.float32 or tokens == 0 or (out == right).float().mean() > 0.99


def test_slots_outside_the_pool_are_refused(native: Ops) -> None:
    rotary = angles(4, 9, torch.float32, torch.arange(1))
    pools = torch.zeros(3, 1, 4), torch.zeros(3, 1, 4)
    for slot in (-1, 3):
        with pytest.raises(RuntimeError, match="outside the pool"):
            native.qk_norm_rope_store(_randn(1, 12), _randn(2, 4), rotary, *pools, torch.tensor([slot]), 1e-6)


@DTYPES
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts_", "top_k"), [(32, 4), (48, 8), (7, 7), (130, 1)])
def test_the_router_chooses_the_largest_logits(
    native: Ops, dtype: torch.dtype, normalise: bool, experts_: int, top_k: int
) -> None:
    """The router is half the identity: its logits are exactly half the normed states, and all differ."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([torch.randperm(experts_, generator=generator) for _ in range(40)]) - experts_ / 2
    residual, hidden = (rows / 8).to(dtype), torch.zeros(40, experts_, dtype=dtype)
    norm, router = torch.ones(experts_, dtype=dtype), 0.5 * torch.eye(experts_, dtype=dtype)
    normed, weights, ids = native.norm_route(
        residual.clone(), hidden, norm, 1e-6, matrix(native, router), RouterRule(experts_, top_k, normalise)
    )
    assert torch.equal(normed, native.add_rms_norm(residual.clone(), hidden, norm, 1e-6))
    logits = 0.5 * normed
    assert torch.equal(ids, logits.float().argsort(descending=True, stable=True)[:, :top_k])
    exact = logits.double().softmax(-1).gather(1, ids)
    exact = exact / exact.sum(-1, keepdim=True) if normalise else exact
    torch.testing.assert_close(weights.double(), exact, rtol=0.6 * torch.finfo(dtype).eps + 2e-6, atol=0)
    assert weights.dtype == dtype


def _route(native: Ops, logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the ids chosen for logits that are a column of the router, so that no arithmetic touches them."""
    router = matrix(native, F.pad(logits[:, None], (0, 1)))
    state = torch.tensor([[2.0, 0.0]])  # its norm is [sqrt(2), 0]
    return native.norm_route(state, None, torch.ones(2), 0.0, router, RouterRule(len(logits), top_k))[2][0]


def test_routes_prefer_the_lowest_of_equals_and_survive_nan(native: Ops) -> None:
    assert _route(native, torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0]), 3).tolist() == [1, 2, 4]
    assert _route(native, torch.zeros(5), 3).tolist() == [0, 1, 2]
    nan = float("nan")
    for strange in ([nan] * 5, [1.0, nan, 3.0, float("inf"), float("-inf")]):
        ids = _route(native, torch.tensor(strange), 3).tolist()
        assert len(set(ids)) == 3 and min(ids) >= 0 and max(ids) < 5


@DTYPES
@pytest.mark.parametrize(("tokens", "depth", "outputs"), [(1, 64, 40), (5, 33, 70), (30, 50, 5)])
def test_the_norm_before_a_linear_is_the_same_norm(
    native: Ops, dtype: torch.dtype, tokens: int, depth: int, outputs: int
) -> None:
    residual, hidden = _randn(tokens, depth, dtype=dtype), _randn(tokens, depth, seed=1, dtype=dtype)
    scale, weight = _randn(depth, seed=2, dtype=dtype), matrix(native, _randn(outputs, depth, seed=3, dtype=dtype))
    for added in (hidden, None):
        together, apart = residual.clone(), residual.clone()
        out = native.norm_linear(together, added, scale, 1e-6, weight, outputs)
        assert torch.equal(out, native.linear(native.add_rms_norm(apart, added, scale, 1e-6), weight, outputs))
        assert torch.equal(together, apart)


@DTYPES
@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (16, 8), (33, 7), (70, 33), (64, 64)])
def test_packed_content_is_read_back_exactly(native: Ops, dtype: torch.dtype, rows: int, depth: int) -> None:
    content = _randn(rows, depth, dtype=dtype)
    storage = native.storage.empty_matrix(rows, depth, dtype, "cpu")
    pieces = [range(rows // 3), range(rows // 3, rows - 1), range(rows - 1, rows)]
    for piece in pieces:
        native.storage.matrix_place(storage, piece, depth).write(content[piece.start : piece.stop].double())
    assert torch.equal(native.storage.matrix_place(storage, range(rows), depth).read(), content)
    for piece in pieces:
        assert torch.equal(native.storage.matrix_place(storage, piece, depth).read(), content[piece.start : piece.stop])
    ids = torch.randint(0, rows, (9,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(native.matrix_rows(storage, ids, depth), content[ids])
    address = storage.data_ptr()
    native.storage.matrix_place(storage, range(rows), depth).write(-content)
    assert storage.data_ptr() == address
    assert torch.equal(native.storage.matrix_place(storage, range(rows), depth).read(), -content)


@DTYPES
@pytest.mark.parametrize("first_row", [0, 5, 16])
@pytest.mark.parametrize("depth", [30, 64, 83, 100])
def test_any_bits_pass_through_packing(native: Ops, dtype: torch.dtype, first_row: int, depth: int) -> None:
    """Even signalling NaN passes, from rows at any address, and neighbours stay untouched."""
    generator, width = torch.Generator().manual_seed(depth), {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    raw = torch.randint(0, 256, (1 + 48 * depth, dtype.itemsize), generator=generator)
    flat = raw.to(torch.uint8).view(-1).view(width)
    storage = native.storage.empty_matrix(96, depth, dtype, "cpu")
    everything = native.storage.matrix_place(storage, range(96), depth)
    everything.write(torch.ones(96, depth, dtype=dtype))
    for offset in (0, 1):
        content = flat[offset : offset + 48 * depth].view(dtype).view(48, depth)
        place = native.storage.matrix_place(storage, range(first_row, first_row + 48), depth)
        place.write(content)
        assert torch.equal(place.read().view(width), content.view(width))
        found = everything.read()
        assert bool((found[:first_row] == 1).all() and (found[first_row + 48 :] == 1).all())


@DTYPES
@pytest.mark.parametrize(("hidden_size", "inner_size"), [(64, 32), (50, 19), (1, 1)])
def test_packed_experts_are_read_back_exactly(
    native: Ops, dtype: torch.dtype, hidden_size: int, inner_size: int
) -> None:
    w13, w2 = _randn(3, 2 * inner_size, hidden_size, dtype=dtype), _randn(3, hidden_size, inner_size, dtype=dtype)
    stored = expert_weights(native, w13, w2)
    for expert in range(3):
        parts = zip(("gate_proj", "up_proj", "down_proj"), (*w13[expert].split(inner_size), w2[expert]))
        for part, content in parts:
            place = native.storage.expert_place(*stored[:2], part, expert, inner_size, hidden_size)
            assert torch.equal(place.read(), content)


@DTYPES
def test_rows_do_not_depend_on_one_another(native: Ops, dtype: torch.dtype) -> None:
    tokens, size, inner = 64, 96, 40
    hidden, weight = _randn(tokens, size, dtype=dtype), _randn(70, size, seed=1, dtype=dtype)
    scale = _randn(size, seed=2, dtype=dtype)
    torch.manual_seed(0)
    ids, weights = torch.randint(0, 5, (tokens, 3)), torch.rand(tokens, 3).to(dtype)
    w13, w2 = _randn(5, 2 * inner, size, seed=3, dtype=dtype), _randn(5, size, inner, seed=4, dtype=dtype)
    packed, stored = matrix(native, weight), expert_weights(native, w13, w2)
    rotary = angles(24, 99, dtype, torch.arange(tokens))
    head_weight, qkv = _randn(3, 24, seed=5, dtype=dtype), _randn(tokens, 96, seed=6, dtype=dtype)

    def heads(rows: torch.Tensor) -> torch.Tensor:
        k_pool, v_pool = torch.zeros(tokens, 1, 24, dtype=dtype), torch.zeros(tokens, 1, 24, dtype=dtype)
        query = native.qk_norm_rope_store(qkv[rows], head_weight, rotary[rows], k_pool, v_pool, rows, 1e-6)
        return torch.cat((query.flatten(1), k_pool[rows].flatten(1), v_pool[rows].flatten(1)), dim=1)

    computations = {
        "linear": lambda rows: native.linear(hidden[rows], packed, 70),
        "norm": lambda rows: native.add_rms_norm(hidden[rows], None, scale, 1e-6),
        "norm and linear": lambda rows: native.norm_linear(hidden[rows], hidden[rows], scale, 1e-6, packed, 70),
        "experts": lambda rows: native.fused_experts(hidden[rows], ids[rows], weights[rows], *stored),
        "slots": lambda rows: native.fused_experts(hidden[rows], ids[rows], None, *stored),
        "router": lambda rows: native.norm_route(hidden[rows], None, scale, 1e-6, packed, RouterRule(70, 5))[1],
        "heads": heads,
    }
    dependent = [name for name, compute in computations.items() if not rows_are_independent(compute, tokens)]
    assert not dependent


@pytest.mark.mutant
def test_the_independence_check_notices_a_dependent_row() -> None:
    hidden = _randn(32, 8)
    assert rows_are_independent(lambda rows: hidden[rows] * 2, 32)
    assert not rows_are_independent(lambda rows: hidden[rows] + 1e-7 * len(rows), 32)
    assert not rows_are_independent(lambda rows: hidden[rows] + hidden[rows[0]], 32)
    assert not rows_are_independent(lambda rows: hidden[rows] * torch.get_num_threads(), 32)


def _one_row(ops: Ops, expert: int = 0, inner: int = 3) -> torch.Tensor:
    w13, w2, _ = expert_weights(ops, _randn(2, 6, 4), _randn(2, 4, 3))
    return ops.fused_experts(_randn(1, 4), torch.tensor([[expert]]), None, w13, w2, inner)


def _route_one(ops: Ops, top_k: int) -> torch.Tensor:
    return ops.norm_route(_randn(2, 3), None, torch.ones(3), 1e-6, matrix(ops, _randn(3, 3)), RouterRule(3, top_k))[0]


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("not in 0..1", lambda ops: _one_row(ops, expert=2)),
        ("not in 0..1", lambda ops: _one_row(ops, expert=-1)),
        ("w13 must be", lambda ops: _one_row(ops, inner=20)),
        ("packed weight is not", lambda ops: ops.linear(_randn(2, 3), matrix(ops, _randn(4, 5)), 4)),
        ("packed weight is not", lambda ops: ops.linear(_randn(2, 3), matrix(ops, _randn(4, 3)), 40)),
        ("one dtype", lambda ops: ops.linear(_randn(2, 3), matrix(ops, _randn(4, 3).bfloat16()), 4)),
        ("bfloat16 and float32", lambda ops: ops.linear(_randn(2, 3).double(), _randn(1, 3, 32, 1).double(), 4)),
        ("residual", lambda ops: ops.add_rms_norm(_randn(3, 2).T, _randn(2, 3), torch.ones(3), 1e-6)),
        ("top_k must be", lambda ops: _route_one(ops, 4)),
        (
            "outside the packed",
            lambda ops: ops.storage.matrix_place(matrix(ops, _randn(4, 3)), range(30, 34), 3).read(),
        ),
        ("negative", lambda ops: ops.matrix_rows(matrix(ops, _randn(4, 3)), torch.tensor([-1]), 3)),
    ],
)
def test_arguments_that_do_not_fit_are_refused(native: Ops, message: str, call) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(native)


def test_effects_are_those_that_the_schemas_say(native: Ops) -> None:
    operators = torch.ops.lockstep
    hidden, weight = _randn(5, 16), torch.ones(16)
    packed = matrix(native, _randn(7, 16))
    cases = [
        (operators.add_rms_norm, (_randn(5, 16, seed=1), hidden, weight, 1e-6)),
        (operators.norm_linear, (_randn(5, 16, seed=1), hidden, weight, 1e-6, packed, 7)),
        (operators.norm_route, (_randn(5, 16, seed=1), hidden, weight, 1e-6, packed, *RouterRule(7, 3))),
        (operators.pack_rows, (packed, _randn(2, 16), 3, 1, 0)),
        (operators.unpack_rows, (packed, 16, 1, 4, 1, 0)),
        (operators.block_sums, (torch.zeros(7, 5, dtype=torch.uint16), torch.arange(5), 3)),
    ]
    for case, arguments in all_cases().items():
        given = as_stored(case, native, copies(arguments, torch.float32)).values()
        flat = [part for value in given for part in (value if isinstance(value, RouterRule) else [value])]
        cases.append((getattr(operators, name_of(case)), tuple(flat)))
    for operator, arguments in cases:
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema",))


def test_the_choice_of_operators() -> None:
    native_ops()
    assert select_ops(torch.bfloat16, "cpu", kernels_available=True).batch_invariant
    assert select_ops(torch.float32, torch.device("cpu"), kernels_available=True).batch_invariant
    for dtype, device, available in (
        (torch.float64, "cpu", True),
        (torch.float16, "cpu", True),
        (torch.bfloat16, "mps", True),
        (torch.bfloat16, "cpu", False),
    ):
        assert select_ops(dtype, device, available).linear is PLAIN.linear


@pytest.mark.parametrize("bias", [True, False])
@DTYPES
def test_biases_partial_rotation_and_heads_without_a_norm(native: Ops, dtype: torch.dtype, bias: bool) -> None:
    hidden, weight = _randn(7, 40, dtype=dtype), _randn(33, 40, seed=1, dtype=dtype)
    added = _randn(33, seed=2, dtype=dtype) if bias else None
    got = native.linear(hidden, matrix(native, weight), 33, added)
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(got, PLAIN.linear(hidden, weight, 33, added), rtol=tolerance, atol=tolerance)
    qkv, slots = _randn(7, 4 * 24, seed=3, dtype=dtype), torch.arange(7)
    rotary = angles(8, 50, dtype, torch.arange(7))
    for head_weight in (None, _randn(3, 24, seed=4, dtype=dtype)):
        pools = [torch.zeros(9, 1, 24, dtype=dtype) for _ in range(4)]
        ours = native.qk_norm_rope_store(qkv, head_weight, rotary, *pools[:2], slots, 1e-6)
        theirs = PLAIN.qk_norm_rope_store(qkv, head_weight, rotary, *pools[2:], slots, 1e-6)
        eps = torch.finfo(dtype).eps
        for one, two in ((ours, theirs), (pools[0], pools[2]), (pools[1], pools[3])):
            torch.testing.assert_close(one, two, rtol=2 * eps, atol=8 * eps)


@DTYPES
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("normalise", [True, False])
def test_sigmoid_routers_choose_as_plain_torch_does(
    native: Ops, dtype: torch.dtype, groups: tuple[int, int], normalise: bool
) -> None:
    hidden, weight = _randn(40, 48, dtype=dtype), _randn(64, 48, seed=1, dtype=dtype) / 4
    norm, bias = torch.ones(48, dtype=dtype), 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(5))
    rule = RouterRule(64, 6, normalise, "sigmoid", 2.5, *groups)
    forced = torch.full((40, 6), -1)
    forced[3], forced[9] = torch.arange(6), torch.arange(6) * 9
    for given in (None, forced):
        ours = native.norm_route(hidden.clone(), None, norm, 1e-6, matrix(native, weight), rule, bias, given)
        theirs = PLAIN.norm_route(hidden.clone(), None, norm, 1e-6, weight, rule, bias, given)
        assert torch.equal(ours[2], theirs[2])
        torch.testing.assert_close(ours[1], theirs[1], rtol=2e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-6)
        if given is not None:
            assert torch.equal(ours[2][[3, 9]], forced[[3, 9]])
