"""Operators of adapters, latent attention and recurrent layers, and two forms of experts, against float64 on the CPU.

They come from torch's registry on CUDA, and from Triton's interpreter in a dry run, as in `test_kernels`.  Numbers that
an operator must not read are NaN.  Sizes are published ones on a device.

Shapes: T tokens, P experts, S adapters, R most ranks, D features, I expert intermediate, H heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.kernels.gpu.register import load_gpu_kernels
from rollout.kernels.ops import gpu_deferred_sum
from tests.delta_rule import Sequences, Sizes
from tests.gpu.numbers import EPS, TOLERANCE, Numbers, close, error_of, exact, plain

TOKENS = 21
RANKS = [[8, 3], [1, 16], [0, 5]]  # of each adapter, in the first part and in the others


def kernel(module: str) -> Any:
    """Import a module of `rollout.kernels.gpu`, whose functions are called without torch's registry."""
    from importlib import import_module

    return import_module(f"rollout.kernels.gpu.{module}")


def wide(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as float64 on the CPU, with zeros in place of NaN, and other tensors on the CPU."""
    found = dict(given)
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            found[name] = value.cpu().double().nan_to_num(0.0) if value.is_floating_point() else value.cpu()
    return found


def slots_of(tokens: int, adapters: int, device: torch.device) -> torch.Tensor:
    """Return the adapter of each token: all of them, and none, in turn."""
    return torch.tensor([(token * 7) % (adapters + 1) - 1 for token in range(tokens)], device=device)


def hide(ranks: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Fill columns of A [.., D, R] and rows of B [.., R, O] that do not count with NaN; `ranks` [..]."""
    unused = torch.arange(a.shape[-1], device=a.device) >= ranks.unsqueeze(-1)
    a.masked_fill_(unused.unsqueeze(-2), float("nan"))
    b.masked_fill_(unused.unsqueeze(-1), float("nan"))


def alone(given: dict[str, Any], token: int, names: tuple[str, ...] = ("out", "hidden", "slots")) -> dict[str, Any]:
    return given | {name: given[name][token : token + 1].contiguous() for name in names}


# --- recurrent layers -------------------------------------------------------------------------------------------------


def test_gated_delta_matches_plain_torch_in_float64(
    op: Any, dtype: torch.dtype, device: torch.device, on_cuda: bool, facts: dict[str, Any]
) -> None:
    """Compare with plain torch in the same dtype.  Chunks and another order of rows change no bit of a sequence."""
    sizes, lens = (Sizes(4, 8, 128, 128, 4), (1, 37, 3, 20)) if on_cuda else (Sizes(2, 4, 12, 10, 4), (1, 11, 3, 5))
    numbers = Sequences(sizes, lens, dtype)
    mine, wanted = numbers.to(dtype, device), numbers.to(torch.float64)
    got = mine.run(op("gated_delta"), mine.at_once())
    near, want = numbers.run(plain.gated_delta, numbers.at_once()), wanted.run(plain.gated_delta, wanted.at_once())
    for name in ("read", "state", "conv"):
        ours, theirs, right = (torch.cat([x.flatten().cpu() for x in getattr(one, name)]) for one in (got, near, want))
        facts[f"error of {name}"], bound = error_of(ours, right), error_of(theirs, right)
        assert facts[f"error of {name}"] <= 1.3 * bound + 0.2 * TOLERANCE[dtype], (name, bound)
    assert mine.run(op("gated_delta"), mine.chunks(4)).equals(got)
    assert mine.run(op("gated_delta"), mine.alone()).equals(got)


# --- latent attention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["absorbed", "of heads"])
def test_queries_and_latents_match_plain_torch_in_float64(
    form: str, op: Any, dtype: torch.dtype, device: torch.device, on_cuda: bool
) -> None:
    """Queries meet latents, or stay as they are for heads.  Only the slots of the tokens are written."""
    heads, nope, turned, rank, value = (16, 128, 64, 512, 128) if on_cuda else (3, 20, 6, 130, 9)
    rand, num_slots = Numbers(dtype, device), 2 * TOKENS
    matrix = rand(heads * (nope + value), rank, scale=rank**-0.5)
    query, latent = rand(TOKENS, heads * (nope + turned)), rand(TOKENS, rank + turned)
    weight, given = rand(rank), (rand(TOKENS, 2, turned), rand(num_slots, 1, rank + turned))
    slots, (angles, pool) = rand.distinct(num_slots, TOKENS), given
    before, stored = pool.clone(), pool.cpu().double()
    absorb = matrix if form == "absorbed" else None
    got = op("latent_query_store")(query, latent, weight, EPS, absorb, heads, angles, pool, slots)
    rest = exact(weight), EPS, exact(absorb), heads, exact(angles), stored, slots.cpu()
    want = plain.latent_query_store(exact(query), exact(latent), *rest)
    assert close(got, want, dtype)
    assert close(pool, stored, dtype)
    others = torch.ones(num_slots, dtype=torch.bool, device=device)
    others[slots] = False
    assert torch.equal(pool[others], before[others]) and not torch.equal(pool, before)


def test_values_of_latents_match_plain_torch_in_float64(
    op: Any, dtype: torch.dtype, device: torch.device, on_cuda: bool
) -> None:
    heads, nope, rank, value = (16, 128, 512, 128) if on_cuda else (3, 20, 130, 9)
    rand = Numbers(dtype, device)
    latents, matrix = rand(70, heads * rank), rand(heads * (nope + value), rank, scale=rank**-0.5)
    got = op("latent_values")(latents, matrix, heads, value)
    assert close(got, plain.latent_values(exact(latents), exact(matrix), heads, value), dtype)
    row = 7 if on_cuda else 0  # numpy's products depend on the place in a tile
    assert torch.equal(op("latent_values")(latents[row : row + 1].contiguous(), matrix, heads, value)[0], got[row])


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_adapters_of_products_match_plain_torch_in_float64(
    op: Any, dtype: torch.dtype, device: torch.device, on_cuda: bool
) -> None:
    """Queries, keys and values of several adapters, a token with the bits that it has alone."""
    rand, (depth, columns) = (
        Numbers(dtype, device),
        (2048, [0, 1024, 1152, 1280]) if on_cuda else (600, [0, 66, 67, 90]),
    )
    ranks = torch.tensor([[first, rest, rest] for first, rest in RANKS], device=device)
    most = int(ranks.max()) + 2
    a, b = rand(3, 3, depth, most, scale=depth**-0.5), rand(3, most, columns[-1], scale=0.5)
    for part in range(3):
        hide(ranks[:, part], a[:, part], b[..., columns[part] : columns[part + 1]])
    given = {"out": rand(TOKENS, columns[-1]), "hidden": rand(TOKENS, depth), "slots": slots_of(TOKENS, 3, device)}
    given |= {"a": a, "b": b, "ranks": ranks, "columns": columns}
    got, none = op("add_lora")(**given), given["slots"] < 0
    assert close(got, plain.add_lora(**wide(given)), dtype)
    assert torch.equal(got[none], given["out"][none])
    assert all(torch.equal(op("add_lora")(**alone(given, token))[0], got[token]) for token in (0, 9, 20))


@pytest.mark.parametrize("name", ["queries", "values"])
def test_adapters_of_heads_match_plain_torch_in_float64(
    name: str, op: Any, dtype: torch.dtype, device: torch.device, on_cuda: bool
) -> None:
    """`kv_b_proj` of latent attention: a matrix for each head on one side, and one of all heads on the other."""
    heads, (nope, turned, rank, value) = (16, (128, 64, 512, 128)) if on_cuda else (3, (20, 6, 130, 9))
    is_query, rand = name == "queries", Numbers(dtype, device)
    (a_heads, b_heads), depth, width = ((heads, 1), nope, rank) if is_query else ((1, heads), rank, value)
    ranks = torch.tensor([[first] for first, _ in RANKS], device=device)
    a, b = rand(3, a_heads, depth, 10, scale=depth**-0.5), rand(3, b_heads, 10, width, scale=0.5)
    hide(ranks.expand(-1, a_heads), a, rand(3, a_heads, 10, 1))
    hide(ranks.expand(-1, b_heads), rand(3, b_heads, 1, 10), b)
    row, out_row = (nope + turned, rank + turned) if is_query else (rank, value)
    given = {"out": rand(TOKENS, heads, out_row), "hidden": rand(TOKENS, heads * row)}
    given |= {"slots": slots_of(TOKENS, 3, device), "a": a, "b": b, "ranks": ranks, "num_heads": heads}
    got, slots = op("add_head_lora")(**given), given["slots"]
    assert close(got, plain.add_head_lora(**wide(given)), dtype)
    unchanged = (slots < 0) | (slots == 2)  # the third adapter has no rank
    assert torch.equal(got[unchanged], given["out"][unchanged])
    assert torch.equal(got[..., width:], given["out"][..., width:])
    assert all(torch.equal(op("add_head_lora")(**alone(given, token))[0], got[token]) for token in (0, 9, 20))


def experts_case(rand: Numbers, tokens: int, top_k: int, on_cuda: bool, clamped: bool) -> dict[str, Any]:
    """Return arguments of `fused_experts`."""
    experts, hidden, inner = (16, 2048, 768) if on_cuda else (4, 72, 40)
    given: dict[str, Any] = {
        "hidden": rand(tokens, hidden),
        "ids": torch.stack([rand.distinct(experts, top_k) for _ in range(tokens)]),
        "weights": rand(tokens, top_k).abs(),
        "w13": rand(experts, 2 * inner, hidden, scale=hidden**-0.5),
        "w2": rand(experts, hidden, inner, scale=inner**-0.5),
        "inner_size": inner,
    }
    biases = (rand(experts, 2 * inner), rand(experts, hidden), 1.5, 1.702) if clamped else (None, None, None, 1.0)
    return given | dict(zip(("w13_bias", "w2_bias", "limit", "alpha"), biases, strict=True))


def adapters_of(given: dict[str, Any], rand: Numbers) -> dict[str, Any]:
    """Return the adapters of `adapted_experts`: gate, up or down of an adapter may have none."""
    (experts, hidden, inner), device = given["w2"].shape, given["w2"].device
    ranks = torch.tensor([[4, 3, 5], [1, 0, 2]], device=device).repeat(experts, 1, 1)
    ranks[-1] = ranks[-1].roll(1, 1)
    a13, b13 = rand(experts, 2, 2, hidden, 7, scale=hidden**-0.5), rand(experts, 2, 7, 2 * inner, scale=0.5)
    a2, b2 = rand(experts, 2, inner, 7, scale=inner**-0.5), rand(experts, 2, 7, hidden, scale=0.5)
    for part in range(2):
        hide(ranks[..., part], a13[:, :, part], b13[..., part * inner : (part + 1) * inner])
    hide(ranks[..., 2], a2, b2)
    slots = slots_of(len(given["hidden"]), 2, device)
    return {"slots": slots, "a13": a13, "b13": b13, "a2": a2, "b2": b2, "ranks": ranks.contiguous()}


@pytest.mark.parametrize("form", ["plain", "biased and clamped"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_with_adapters_match_plain_torch_in_float64(
    tokens: int, form: str, op: Any, dtype: torch.dtype, device: torch.device, on_cuda: bool
) -> None:
    """A row without an adapter has the bits of the experts alone; each row has the bits that it has alone."""
    rand = Numbers(dtype, device)
    base = experts_case(rand, tokens, 2, on_cuda, form != "plain")
    given = base | adapters_of(base, rand)
    got, none = op("adapted_experts")(**given), given["slots"] < 0
    assert close(got, plain.adapted_experts(**wide(given)), dtype)
    assert none.any() and torch.equal(got[none], op("fused_experts")(**base)[none])
    row = tokens - 1 if on_cuda else 0
    rows = alone(given, row, ("hidden", "ids", "weights", "slots"))
    assert torch.equal(op("adapted_experts")(**rows)[0], got[row])


# --- two forms of experts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expected", [1, 400], ids=["few expected", "many expected"])
def test_experts_of_packed_rows_match_plain_torch_in_float64(
    expected: int, op: Any, dtype: torch.dtype, device: torch.device, on_cuda: bool
) -> None:
    """Places without a row hold NaN.  Rows have the bits that they have in slots, with tiles for any load."""
    if on_cuda:
        assert load_gpu_kernels().available
    rand, places = Numbers(dtype, device), 20
    base = experts_case(rand, 1, 1, on_cuda, clamped=True)
    experts, hidden, _ = base["w2"].shape
    counts = torch.tensor([(3, 0, 17, 1)[expert % 4] for expert in range(experts)], dtype=torch.int32, device=device)
    filled = torch.arange(places, device=device) < counts.unsqueeze(1)
    rows = rand(experts, places, hidden).masked_fill(~filled.unsqueeze(-1), float("nan"))
    matrices = [base[name] for name in ("w13", "w2", "w13_bias", "w2_bias", "limit", "alpha")]
    got = kernel("packed_experts").packed_experts(rows, counts, expected, *matrices)[filled]
    ids = torch.arange(experts, device=device).unsqueeze(1).expand(-1, places)[filled].unsqueeze(1)
    in_slots = base | {"hidden": rows[filled], "ids": ids, "weights": None}
    assert close(got, plain.fused_experts(**wide(in_slots)).squeeze(1), dtype)
    assert torch.equal(got, op("fused_experts")(**in_slots).squeeze(1))


@pytest.mark.parametrize("offset", [None, 1.0], ids=["weight", "1 + weight"])
@pytest.mark.parametrize("adapted", [False, True], ids=["experts", "with adapters"])
def test_a_norm_that_sums_experts_matches_plain_torch_in_float64(
    adapted: bool, offset: float | None, op: Any, dtype: torch.dtype, device: torch.device, on_cuda: bool
) -> None:
    """It also has the bits of the sum and of the norm, one after the other."""
    rand = Numbers(dtype, device)
    base = experts_case(rand, 9, 2, on_cuda, clamped=False)
    given = base | adapters_of(base, rand) if adapted else base
    size, deferred = base["hidden"].shape[1], gpu_deferred_sum()
    residual, weight, name = rand(9, size), rand(size), "adapted_experts" if adapted else "fused_experts"
    before, apart = exact(residual), residual.clone()
    outputs = (deferred.adapted if adapted else deferred.outputs)(**given)
    got = deferred.norm(residual, outputs, weight, EPS, offset)
    want = plain.add_rms_norm(before, getattr(plain, name)(**wide(given)), exact(weight), EPS, offset)
    assert close(residual, before, dtype) and close(got, want, dtype)
    assert torch.equal(got, op("add_rms_norm")(apart, op(name)(**given), weight, EPS, offset))
    assert torch.equal(residual, apart)
