"""Each operator on the device against plain torch in float64 on the CPU, for published sizes and odd ones.

On CUDA the operators come from torch's registry, so that a test also shows that a model gets the Triton kernel.
A dry run calls the same kernels in Triton's interpreter, in float32 and at small sizes.

Tolerances: `tests/gpu/numbers.py`.  Shapes: as in `operators`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout.attention.flashinfer_sequences import gather_slots
from rollout.kernels.gpu.register import TRITON_OPERATORS, load_gpu_kernels
from rollout.kernels.operators.norm_route import RouterRule, of_best_groups
from rollout.kernels.ops import ExpertPart, RowMajorHeld
from rollout.kernels.row_places import ROW_FORMS, RowsPlace
from tests.gpu.needs import need_cuda
from tests.gpu.numbers import EPS, TOLERANCE, Numbers, close, error_of, exact, plain
from weight_sync.content_check import check_content
from weight_sync.errors import ContentError
from weight_sync.fingerprint import fingerprint, fingerprint_slice
from weight_sync.fingerprint_words import multipliers
from weight_sync.held_format import FP8_PAIRS, INT4_GROUPS, INT4_GROUPS_128
from weight_sync.spans import DTYPE_CODES, SpanTensor
from weight_sync.take_spans import SpanTables, take_spans_plainly
from weight_sync.tensor_meta import DTYPES


def test_every_kernel_is_registered(on_cuda: bool) -> None:
    """Without a registered kernel every test below, and every model, would run on plain torch without notice."""
    need_cuda(torch.device("cuda" if on_cuda else "cpu"), "kernels in torch's registry for CUDA")
    assert load_gpu_kernels().available, load_gpu_kernels().reason
    for name in TRITON_OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lockstep::{name}", "CUDA"), name


@pytest.mark.parametrize("offset", [None, 1.0], ids=["weight", "1 + weight"])
@pytest.mark.parametrize("shape", [(1, 2048), (3, 200), (130, 512)], ids=str)
def test_norms_match_plain_torch_in_float64(
    shape: tuple[int, int], offset: float | None, op: Any, dtype: torch.dtype, device: torch.device
) -> None:
    rand = Numbers(dtype, device)
    residual, hidden, weight = rand(*shape), rand(*shape), rand(shape[1])
    summed = exact(residual) + exact(hidden)  # type: ignore[operator]
    got = op("add_rms_norm")(residual, hidden, weight, EPS, offset)
    assert close(residual, summed, dtype)
    assert close(got, plain.add_rms_norm(exact(residual), None, exact(weight), EPS, offset), dtype)
    matrix = rand(64, shape[1], scale=shape[1] ** -0.5)
    before = residual.clone()
    got = op("norm_linear")(residual, None, weight, EPS, matrix, 64, None, offset)
    want = plain.norm_linear(exact(before), None, exact(weight), EPS, exact(matrix), 64, None, offset)
    assert close(got, want, dtype)


ROUTERS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_experts": 128, "top_k": 8, "normalise": True},
    "odd": {"num_experts": 60, "top_k": 3, "normalise": False},
    "deepseek": {
        "num_experts": 64,
        "top_k": 6,
        "normalise": True,
        "scoring": "sigmoid",
        "scaling": 2.5,
        "num_groups": 8,
        "top_groups": 4,
    },
    "gpt_oss": {"num_experts": 32, "top_k": 4, "normalise": True, "scoring": "softmax_of_chosen"},
}


def router_case(name: str, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments of `norm_route`, residual first, and biases by name."""
    rule, size, rand = RouterRule(**ROUTERS[name]), 128, Numbers(dtype, device, seed=tokens)
    experts, biases = rule.num_experts, {}
    if rule.scoring == "sigmoid":
        biases["correction_bias"] = 0.1 * rand(experts).float()
    if rule.scoring == "softmax_of_chosen":
        biases["bias"] = rand(experts)
    return [rand(tokens, size), None, rand(size), EPS, rand(experts, size, scale=2.5 * size**-0.5), rule], biases


def copies(arguments: list[Any]) -> list[Any]:
    """Copy the tensors, because the operator changes the residual in place."""
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]


def choices_of(arguments: list[Any], settings: dict[str, Any]) -> torch.Tensor:
    """Return the values that experts are chosen by [T, E] in float64; -inf for the experts of groups that lose."""
    normed = plain.add_rms_norm(exact(arguments[0]), None, exact(arguments[2]), EPS)
    logits = normed @ exact(arguments[4]).T  # type: ignore[union-attr]
    if arguments[5].scoring != "sigmoid":
        return logits + exact(settings["bias"]) if "bias" in settings else logits  # type: ignore[operator]
    choices = logits.sigmoid() + exact(settings["correction_bias"])  # type: ignore[operator]
    return of_best_groups(choices, arguments[5].num_groups, arguments[5].top_groups)


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("name", list(ROUTERS))
def test_routers_choose_what_the_definition_chooses(
    name: str, tokens: int, op: Any, dtype: torch.dtype, device: torch.device
) -> None:
    """Give or take rounding: no expert that was left out is better, in float64, than one that was taken."""
    arguments, settings = router_case(name, tokens, dtype, device)
    normed, weights, ids = op("norm_route")(*copies(arguments), **settings)
    assert close(normed, plain.add_rms_norm(exact(arguments[0]), None, exact(arguments[2]), EPS), dtype)
    choices, slack = choices_of(arguments, settings), 1e-4 if dtype == torch.float32 else 6e-2
    taken = choices.gather(1, ids.cpu())
    left = choices.scatter(1, ids.cpu(), float("-inf")).amax(-1)
    grouped = arguments[5].num_groups > 1 and dtype == torch.bfloat16  # another group may be the best by rounding
    assert grouped or (taken.amin(-1) >= left - slack).all()
    assert grouped or (taken[:, :-1] >= taken[:, 1:] - slack).all(), "best first"
    assert all(len(set(row)) == arguments[5].top_k for row in ids.tolist())
    more = {key: exact(x) if isinstance(x, torch.Tensor) else x for key, x in settings.items()}
    on_host = [exact(x) if isinstance(x, torch.Tensor) else x for x in arguments]
    _, want, _ = plain.norm_route(*on_host, **more, forced_ids=ids.cpu())
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2  # logits of 2 to 8 are rounded to 8 bits
    assert error_of(weights, want) < tolerance


@pytest.mark.parametrize("tokens", [1, 37])
def test_of_equal_scores_the_lower_id_comes_first(
    tokens: int, op: Any, dtype: torch.dtype, device: torch.device
) -> None:
    """Every row of the router's matrix stands there four times, so that scores are equal bit for bit."""
    arguments, settings = router_case("qwen3", tokens, dtype, device)
    arguments[4] = arguments[4][:32].repeat(4, 1).contiguous()
    _, _, ids = op("norm_route")(*arguments, **settings)
    for row in ids.tolist():
        for group in {expert % 32 for expert in row}:
            of_group = [expert for expert in row if expert % 32 == group]
            assert of_group == [group + 32 * i for i in range(len(of_group))], row


def test_forced_rows_replace_choices(op: Any, dtype: torch.dtype, device: torch.device) -> None:
    arguments, settings = router_case("qwen3", 9, dtype, device)
    forced = torch.full((9, 8), -1, dtype=torch.int64, device=device)
    forced[::2] = torch.arange(100, 108, device=device)
    _, _, free = op("norm_route")(*copies(arguments), **settings)
    _, weights, ids = op("norm_route")(*arguments, **settings, forced_ids=forced)
    assert torch.equal(ids[::2], forced[::2]) and torch.equal(ids[1::2], free[1::2])
    assert torch.allclose(weights.float().sum(-1), torch.ones(9, device=device), atol=1e-2)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "rotated"), [(32, 4, 128, 128), (6, 2, 48, 24)])
@pytest.mark.parametrize("norms", [True, False])
def test_rotation_and_store_match_plain_torch_in_float64(
    heads: int, kv_heads: int, size: int, rotated: int, norms: bool, op: Any, dtype: torch.dtype, device: torch.device
) -> None:
    rand, tokens, num_slots = Numbers(dtype, device), 19, 64
    qkv = rand(tokens, (heads + 2 * kv_heads) * size)
    weight = rand(heads + kv_heads, size) if norms else None
    angles, slots = rand(tokens, 2, rotated), rand.distinct(num_slots, tokens)
    pools = [rand(num_slots, kv_heads, size) for _ in range(2)]
    on_host = [exact(pool) for pool in pools]
    want = plain.qk_norm_rope_store(exact(qkv), exact(weight), exact(angles), *on_host, slots.cpu(), EPS)
    got = op("qk_norm_rope_store")(qkv, weight, angles, *pools, slots, EPS)
    assert close(got, want, dtype)
    for pool, wanted in zip(pools, on_host, strict=True):
        assert close(pool, wanted, dtype)


def test_activations_match_plain_torch_in_float64(op: Any, dtype: torch.dtype, device: torch.device) -> None:
    rand = Numbers(dtype, device)
    both = rand(33, 2 * 768)
    assert close(op("silu_and_mul")(both), plain.silu_and_mul(exact(both)), dtype)
    hidden, gate = rand(33, 512), rand(33, 8)
    want = plain.sigmoid_gate(exact(hidden), exact(gate))
    assert close(op("sigmoid_gate")(hidden.clone(), gate), want, dtype)


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_sums_over_ranks_have_the_bits_of_plain_torch(
    ranks: int, op: Any, dtype: torch.dtype, device: torch.device
) -> None:
    parts = Numbers(dtype, device)(ranks, 33, 768)
    assert torch.equal(op("sum_in_order")(parts).cpu(), plain.sum_in_order(parts.cpu()))


def test_slots_of_sequences_are_those_that_torch_gathers(device: torch.device) -> None:
    table = torch.randint(0, 1 << 31, (65, 4096))
    rows, first = np.arange(64), np.arange(64) * 3
    counts = np.arange(64) ** 2 % 3900
    assert torch.equal(
        gather_slots(table.to(device), rows, first, counts).cpu(), gather_slots(table, rows, first, counts)
    )


@pytest.mark.parametrize("form", ["plain", "biased and clamped", "unsummed"])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_experts_match_plain_torch_in_float64(
    tokens: int, form: str, op: Any, dtype: torch.dtype, device: torch.device
) -> None:
    rand, experts, top_k, hidden, inner = Numbers(dtype, device), 12, 3, 96, 80
    x, ids = rand(tokens, hidden), torch.stack([rand.distinct(experts, top_k) for _ in range(tokens)])
    ids[: tokens // 2, 0] = ids[: tokens // 2, 1:].amax(1) * 0 + experts - 1  # many tokens at one expert
    w13, w2 = rand(experts, 2 * inner, hidden, scale=0.1), rand(experts, hidden, inner, scale=0.1)
    weights = None if form == "unsummed" else rand(tokens, top_k).abs()
    more: list[Any] = [None, None, None, 1.0]
    if form == "biased and clamped":
        more = [rand(experts, 2 * inner), rand(experts, hidden), 1.5, 1.702]
    on_host = [exact(value) if isinstance(value, torch.Tensor) else value for value in more]
    want = plain.fused_experts(exact(x), ids.cpu(), exact(weights), exact(w13), exact(w2), inner, *on_host)
    assert close(op("fused_experts")(x, ids, weights, w13, w2, inner, *more), want, dtype)


@pytest.mark.parametrize("form", ROW_FORMS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_experts_in_fewer_bits(tokens: int, form: str, op: Any, device: torch.device, on_cuda: bool) -> None:
    """The reference is float64 products of the values that are held; half precision in a dry run."""
    dtype, (experts, top_k, hidden, inner) = torch.bfloat16 if on_cuda else torch.float16, (6, 2, 256, 128)
    rand, storage = Numbers(dtype, device), RowMajorHeld(form, dtype, device)
    w13, w2 = storage.empty_experts(experts, inner, hidden, dtype, device)
    values = rand(experts, 2 * inner, hidden, scale=0.1).cpu(), rand(experts, hidden, inner, scale=0.1).cpu()
    gate, up = values[0].split(inner, 1)
    parts: list[tuple[ExpertPart, torch.Tensor]] = [("gate_proj", gate), ("up_proj", up), ("down_proj", values[1])]
    for part, contents in parts:
        for expert, content in enumerate(contents):
            place = storage.expert_place(w13, w2, part, expert, inner, hidden)
            place.write(content)
            content.copy_(place.read())
    x, ids = rand(tokens, hidden), torch.stack([rand.distinct(experts, top_k) for _ in range(tokens)])
    weights = rand(tokens, top_k).abs()
    got = op("fused_experts")(x, ids, weights, w13, w2, inner)
    want = plain.fused_experts(exact(x), ids.cpu(), exact(weights), *map(exact, values), inner)
    assert error_of(got, want) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("form", ROW_FORMS)
@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_linear_in_fewer_bits(tokens: int, form: str, op: Any, device: torch.device, on_cuda: bool) -> None:
    """The reference is a float64 product of the values; a row among others has the bits that it has alone."""
    dtype, (rows, depth) = torch.bfloat16 if on_cuda else torch.float16, (200, 256)
    rand, held = Numbers(dtype, device), ROW_FORMS[form]
    place = RowsPlace(held, held.empty((rows,), depth, device), depth, dtype)
    place.write(rand(rows, depth, scale=0.1))
    x, bias = rand(tokens, depth), rand(rows)
    got = op("linear")(x, place.storage, rows, bias)
    wide, matrix, added = (tensor.cpu().double() for tensor in (x, place.read(), bias))
    assert error_of(got, wide @ matrix.T + added) < TOLERANCE[torch.bfloat16]
    if on_cuda:
        assert torch.equal(op("linear")(x[:1].contiguous(), place.storage, rows, bias), got[:1])


@pytest.mark.parametrize("name", ["fp8", "int4", "int4-128"])
def test_quantising_has_the_bits_of_a_cpu(name: str, device: torch.device) -> None:
    """A device that divides by a number as it multiplies with its inverse has other scales."""
    need_cuda(device, "another device than a CPU")
    values = Numbers(torch.bfloat16, torch.device("cpu"))(1024, 1024)
    pairs = {"fp8": FP8_PAIRS, "int4": INT4_GROUPS, "int4-128": INT4_GROUPS_128}[name].pairs
    assert pairs is not None
    want, got = pairs.quantise(values), pairs.quantise(values.to(device))
    assert torch.equal(got.scale.cpu(), want.scale)
    assert torch.equal(got.weight.cpu().view(torch.uint8), want.weight.view(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 4096])
def test_experts_of_30b_a3b(tokens: int, device: torch.device, facts: dict[str, Any]) -> None:
    """E=128, D=2048, I=768, K=8 in bfloat16, against float32 products on the device, expert by expert."""
    need_cuda(device, "memory and time for experts of this size")
    load_gpu_kernels()
    generator = torch.Generator(device).manual_seed(0)

    def rand(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * scale

    experts, hidden, inner, top_k = 128, 2048, 768, 8
    w13, w2 = rand(experts, 2 * inner, hidden, scale=hidden**-0.5), rand(experts, hidden, inner, scale=inner**-0.5)
    x, scores = rand(tokens, hidden, scale=1.0), torch.randn(tokens, experts, generator=generator, device=device)
    weights, ids = scores.softmax(-1).topk(top_k)
    got = torch.ops.lockstep.fused_experts.default(x, ids, weights.bfloat16(), w13, w2, inner)
    want = torch.zeros(tokens, hidden, device=device)
    for expert in range(experts):
        rows, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[rows].float() @ w13[expert].float().T).split(inner, -1)
        out = (torch.nn.functional.silu(gate) * up) @ w2[expert].float().T
        want.index_add_(0, rows, out * weights.bfloat16().float()[rows, place, None])
    facts["error"] = error_of(got, want.cpu())
    assert facts["error"] < TOLERANCE[torch.bfloat16]


def test_a_row_has_the_same_bits_in_every_batch(
    op: Any, dtype: torch.dtype, device: torch.device, on_cuda: bool
) -> None:
    """Operators that are one kernel of ours: alone, or among 33.

    In a dry run the row is the first of its tile, as numpy's products depend on the place in it.
    """
    rand, row = Numbers(dtype, device), 7 if on_cuda else 0
    one = slice(row, row + 1)
    residual, weight = rand(33, 256), rand(256)
    many = op("add_rms_norm")(residual, None, weight, EPS)
    assert torch.equal(op("add_rms_norm")(residual[one].contiguous(), None, weight, EPS), many[one])
    arguments, settings = router_case("qwen3", 33, dtype, device)
    alone = [arguments[0][one].clone(), *arguments[1:]]
    together = op("norm_route")(*copies(arguments), **settings)
    for got, of_many in zip(op("norm_route")(*alone, **settings), together, strict=True):
        assert torch.equal(got, of_many[one])
    experts = (rand(12, 160, 96, scale=0.1), rand(12, 96, 80, scale=0.1), 80)
    x, ids, shares = rand(33, 96), torch.stack([rand.distinct(12, 3) for _ in range(33)]), rand(33, 3)
    many = op("fused_experts")(x, ids, shares, *experts)
    assert torch.equal(op("fused_experts")(x[one], ids[one], shares[one], *experts), many[one])


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e4m3fn", "uint8", "int64"])
def test_fingerprints_are_the_host_s(name: str, device: torch.device) -> None:
    found = DTYPES[name]
    words = torch.randint(0, 120, (5, 3, 4096 + 24), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    content = words.view(found)
    there = content.to(device)
    assert fingerprint(there) == fingerprint(content)
    assert fingerprint(there[1:], offset=content[:1].numel()) == fingerprint(content[1:], offset=content[:1].numel())
    index = (slice(None), slice(0, 2), slice(3, 90))
    assert fingerprint_slice(there[index], content.shape, index) == fingerprint_slice(
        content[index], content.shape, index
    )
    changed = there.clone()
    changed.view(torch.uint8).view(-1)[777] ^= 1
    assert fingerprint(changed) != fingerprint(content)


def test_fingerprints_of_a_bucket_are_the_host_s(device: torch.device) -> None:
    flat = torch.randn(5 * (1 << 18), generator=torch.Generator().manual_seed(2)).bfloat16()
    host = list(zip("ab", flat.split([1 << 18, 1 << 20]), strict=True))
    there = [(name, tensor.to(device)) for name, tensor in host]
    assert check_content(there, {}) == check_content(host, {})
    there[1][1][70_000] = float("inf")
    with pytest.raises(ContentError, match="not finite in b"):
        check_content(there, {})


def test_a_bucket_is_taken_by_tables_as_on_the_host(device: torch.device) -> None:
    """Tensors of two dtypes, one of them transposed and cast, the last at an odd address."""
    random = torch.Generator().manual_seed(3)
    parts = [torch.randn(2100, 1300, generator=random).bfloat16(), torch.randn(70, 90, generator=random)]
    flat = [part.view(-1).view(torch.uint8) for part in (*parts, parts[1])]
    source = torch.cat([*flat[:2], torch.zeros(1, dtype=torch.uint8), flat[2]])
    bf16, f32, offset = DTYPE_CODES[torch.bfloat16], DTYPE_CODES[torch.float32], flat[0].numel()
    tensors = [
        SpanTensor.whole(0, bf16, bf16, 2100, 1300, 1300, 1),
        SpanTensor(offset, f32, bf16, 200, 300, 1, 90, 110, 90, 230, 70),  # a box of a larger tensor
        SpanTensor.whole(offset + flat[1].numel() + 1, f32, f32, 70, 90, 90, 1),
    ]
    moves = [
        (0, 0, 0, 64, 100, 2000, 200, 1000, 1000, 1, 0),
        (1, 0, 1, 0, 100, 90, 220, 70, 70, 1, 0),
        (2, 0, 1, 1 << 16, 3, 50, 1, 80, 1, 64, 0),
    ]
    tables = torch.tensor(tensors), torch.tensor(moves)
    host = [torch.zeros(64 + 2 * 2_000_000, dtype=torch.uint8), torch.zeros(1 << 17, dtype=torch.uint8)]
    there = [storage.to(device) for storage in host]
    wanted = take_spans_plainly(source, *tables, host, multipliers("cpu"), True, True)
    found = SpanTables(*tables).take(source.to(device), there)
    for one, other in zip((*found, *there), (*wanted, *host), strict=True):
        assert torch.equal(one.cpu(), other)
