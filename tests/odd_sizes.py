"""Every compiled operator over odd sizes, and a digest of all results.

    python -m tests.odd_sizes LIBRARY     with the operators of that library; prints the digest

Shapes: T tokens, D hidden, O output features, E logical experts, P physical experts, K top-k, I expert intermediate,
H query heads, Hkv key/value heads, hd head size, S slots of the pool, V vocabulary.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple
from itertools import product

import torch

from rollout.core.sampling_params import SamplingParams
from rollout.core.specs.layer_specs import RotarySpec
from rollout.kernels.operators.norm_route import RouterRule
from rollout.kernels.ops import Ops, compiled_ops
from rollout.kernels.places import LatentSizes
from rollout.layers.norm_rotary import RotaryTable
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.sampling.native_sampler import NativeSampler
from tests.delta_rule import Sequences, Sizes
from tests.kernels import plain_build
from tests.layer_storage import PARTS, stored_experts, stored_latent, stored_matrix
from weight_sync.moves import MoveKind
from weight_sync.spans import CAST_DTYPES, DTYPE_CODES, INT8_BLOCKS_CODE, SpanTensor
from weight_sync.take_spans import take_spans

DTYPES = (torch.bfloat16, torch.float32)
# Around a group of two, a vector of 16, a panel of 32 and a token tile of 12 (3 on other processors).
DEPTHS = (1, 2, 16, 33, 131)
OUTPUTS = (1, 16, 33, 70)
TOKENS = (0, 1, 4, 13, 25, 200)
EPS = 1e-6
CASTS = (*product(CAST_DTYPES, CAST_DTYPES), (torch.bfloat16, None), (torch.float32, None))
"""Dtypes as sent and as held; None for 8 bits."""


def _randn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def _refuses(call: Callable[[], object]) -> None:
    """Check that a call with wrong arguments raises an error; operators raise before they touch anything."""
    try:
        call()
    except (RuntimeError, ValueError, IndexError):
        return
    raise AssertionError("wrong arguments were taken")


def matrices(ops: Ops) -> Iterator[torch.Tensor]:
    for dtype, depth, outputs in product(DTYPES, DEPTHS, OUTPUTS):
        weight, scale = _randn(dtype, outputs, depth), _randn(dtype, depth)
        storage = stored_matrix(ops, weight)
        for rows in (range(outputs), range(outputs // 2, outputs), range(outputs - 1, outputs), range(0)):
            place = ops.storage.matrix_place(storage, rows, depth)
            assert torch.equal(place.read(), weight[rows.start : rows.stop])
        ids = torch.tensor([outputs - 1, 0, outputs - 1])
        assert torch.equal(ops.matrix_rows(storage, ids, depth), weight[ids])
        assert torch.equal(ops.gather_rows(weight, ids), weight[ids])
        _refuses(lambda: ops.gather_rows(weight, torch.tensor([outputs])))  # noqa: B023
        for tokens in TOKENS:
            hidden, residual = _randn(dtype, tokens, depth), _randn(dtype, tokens, depth)
            yield ops.linear(hidden, storage, outputs)
            yield ops.linear(_randn(dtype, tokens, depth + 3)[:, 1:-2], storage, outputs)
            yield ops.norm_linear(residual, hidden, scale, EPS, storage, outputs)
            yield ops.norm_linear(residual, None, scale, EPS, storage, outputs)
            yield ops.add_rms_norm(residual, hidden, scale, EPS)
            yield ops.add_rms_norm(residual, None, scale, EPS)
            yield residual
        _refuses(lambda: ops.linear(_randn(dtype, 3, depth + 2), storage, outputs))  # noqa: B023
        _refuses(lambda: ops.matrix_rows(storage, torch.tensor([-1]), depth))  # noqa: B023
        _refuses(lambda: ops.matrix_rows(storage, torch.tensor([999]), depth))  # noqa: B023


def routers(ops: Ops) -> Iterator[torch.Tensor]:
    for dtype, depth, experts in product(DTYPES, (1, 17, 64), (1, 7, 16, 33, 130)):
        storage, scale = stored_matrix(ops, _randn(dtype, experts, depth)), _randn(dtype, depth)
        for tokens, top_k, normalise in product((0, 1, 9, 40), {1, (experts + 1) // 2, experts}, (False, True)):
            residual, hidden = _randn(dtype, tokens, depth), _randn(dtype, tokens, depth)
            for row in residual[:2]:
                row.fill_(torch.nan)  # ids stay ids whatever the scores are
            normed, weights, ids = ops.norm_route(
                residual, hidden, scale, EPS, storage, RouterRule(experts, top_k, normalise)
            )
            assert tokens == 0 or (int(ids.min()) >= 0 and int(ids.max()) < experts)
            yield from (normed[2:], weights[2:], ids)
            if normalise:
                rule, bias = RouterRule(experts, top_k, scoring="softmax_of_chosen"), _randn(dtype, experts)
                rest = (storage, rule, None, None, None, bias)
                normed, weights, ids = ops.norm_route(residual, hidden, scale, EPS, *rest)
                assert tokens == 0 or (int(ids.min()) >= 0 and int(ids.max()) < experts)
                yield from (weights[2:], ids)


def activations(ops: Ops) -> Iterator[torch.Tensor]:
    for dtype, inner, tokens in product(DTYPES, DEPTHS, TOKENS):
        yield ops.silu_and_mul(_randn(dtype, tokens, 2 * inner))
        for gates in {1, inner}:
            yield ops.sigmoid_gate(_randn(dtype, tokens, inner), _randn(dtype, tokens, gates + 3)[:, 1:-2])
        for ranks in (1, 2, 16):
            yield ops.sum_in_order(_randn(dtype, ranks, tokens, inner))
    _refuses(lambda: ops.silu_and_mul(torch.ones(2, 3)))
    _refuses(lambda: ops.sum_in_order(torch.ones(0, 3)))


def delta_rules(ops: Ops) -> Iterator[torch.Tensor]:
    for dtype, (key_heads, heads), key_dim, value_dim, taps in product(
        DTYPES, ((1, 1), (2, 6)), (1, 18, 64), (1, 15, 32, 70), (1, 2, 4)
    ):
        sizes = Sizes(key_heads, heads, key_dim, value_dim, taps)
        sequences = Sequences(sizes, (1, 2, 16, 35), dtype)
        for steps in (sequences.at_once(), sequences.chunks(17)):
            results = sequences.run(ops.gated_delta, steps)
            yield from (*results.read, *results.state, *results.conv)
        copied = Sequences(sizes, (33,), dtype).through_snapshots(ops.gated_delta, [1, 16, 32])
        yield from (*copied.read, *copied.state, *copied.conv)


ROUTINGS: dict[str, Callable[[int], torch.Tensor]] = {
    "none": lambda experts: torch.empty(0, 2, dtype=torch.int64),
    "one token, first and last expert": lambda experts: torch.tensor([[experts - 1, 0]]),
    "spread": lambda experts: torch.randint(0, experts, (37, 3)),
    "all on the last": lambda experts: torch.full((59, 1), experts - 1),
    "most without a token": lambda experts: torch.tensor([[experts // 2, 0]] * 13),
    "an expert twice": lambda experts: torch.zeros(5, 2, dtype=torch.int64),
}


def experts(ops: Ops) -> Iterator[torch.Tensor]:
    for dtype, hidden, inner, count in product(DTYPES, (1, 17, 64, 131), (1, 16, 33), (1, 6)):
        projections = [_randn(dtype, count, inner, hidden) for _ in range(2)] + [_randn(dtype, count, hidden, inner)]
        w13, w2 = stored_experts(ops, *projections)
        for part, weights in zip(PARTS, projections, strict=True):
            for expert in (0, count - 1):
                place = ops.storage.expert_place(w13, w2, part, expert, inner, hidden)
                assert torch.equal(place.read(), weights[expert])
        for routing in ROUTINGS.values():
            ids = routing(count)
            rows, factors = _randn(dtype, len(ids), hidden), torch.rand(ids.shape).to(dtype)
            yield ops.fused_experts(rows, ids, factors, w13, w2, inner)
            yield ops.fused_experts(rows, ids, None, w13, w2, inner)
            biases = _randn(dtype, count, 2 * inner), _randn(dtype, count, hidden)
            yield ops.fused_experts(rows, ids, factors, w13, w2, inner, *biases, 1.5, 1.7)
        for wrong in (count, -1, 2**40):
            row, ids = _randn(dtype, 1, hidden), torch.tensor([[wrong]])
            _refuses(lambda: ops.fused_experts(row, ids, None, w13, w2, inner))  # noqa: B023


def heads(ops: Ops) -> Iterator[torch.Tensor]:
    slots = 23
    for dtype, size, (num_heads, num_kv_heads) in product(DTYPES, (2, 6, 16, 24, 40, 128), ((1, 1), (6, 2), (5, 5))):
        weight = _randn(dtype, num_heads + num_kv_heads, size)
        table = RotaryTable(RotarySpec(dim=size, theta=10000.0), 50, plain_build(dtype))
        for tokens in (0, 1, 9, slots):
            qkv = _randn(dtype, tokens, (num_heads + 2 * num_kv_heads) * size)
            pools = [torch.zeros(slots, num_kv_heads, size, dtype=dtype) for _ in range(2)]
            angles, places = table.angles(49 - torch.arange(tokens)), slots - 1 - torch.arange(tokens)
            yield ops.qk_norm_rope_store(qkv, weight, angles, *pools, places, EPS)
            yield from pools
        for wrong in (slots, -1):
            place = torch.tensor([wrong])
            row, angle = qkv[:1], table.angles(torch.tensor([0]))
            _refuses(lambda: ops.qk_norm_rope_store(row, weight, angle, *pools, place, EPS))  # noqa: B023


def latents(ops: Ops) -> Iterator[torch.Tensor]:
    """Run sizes around a group, a vector and a panel, and more tokens than an item takes at once."""
    for dtype, heads, sizes, rotary_dim in product(
        DTYPES, (1, 3), (LatentSizes(1, 1, 1), LatentSizes(7, 33, 17), LatentSizes(33, 16, 70)), (2, 18, 64)
    ):
        weight = _randn(dtype, heads * (sizes.nope + sizes.value), sizes.rank)
        stored = stored_latent(ops, weight, heads, sizes)
        assert torch.equal(ops.storage.latent_place(stored, sizes).read(), weight)
        norm, pool = _randn(dtype, sizes.rank), torch.zeros(210, 1, sizes.rank + rotary_dim, dtype=dtype)
        for tokens in (0, 1, 13, 210):
            query = _randn(dtype, tokens, heads * (sizes.nope + rotary_dim))
            latent, angles = _randn(dtype, tokens, sizes.rank + rotary_dim), _randn(dtype, tokens, 2, rotary_dim)
            yield ops.latent_query_store(
                query, latent, norm, EPS, stored, heads, angles, pool, 209 - torch.arange(tokens)
            )
            yield pool
            yield ops.latent_values(_randn(dtype, tokens, heads * sizes.rank), stored, heads, sizes.value)
        for wrong in (210, -1):
            rows, place = (query[:1], latent[:1], norm, EPS, stored, heads, angles[:1], pool), torch.tensor([wrong])
            _refuses(lambda: ops.latent_query_store(*rows, place))  # noqa: B023


def attention(ops: Ops) -> Iterator[torch.Tensor]:
    """Run lengths at the edges of blocks of 64 and segments of 512.

    The last sequence uses the first and the last slot.
    """
    attend = torch.ops.lockstep.paged_attention
    lengths = (1, 63, 64, 65, 128, 511, 512, 513, 600)
    slots = sum(lengths)
    for dtype, (num_heads, num_kv_heads, size) in product(
        (*DTYPES, torch.float16), ((4, 4, 16), (6, 1, 8), (8, 2, 64), (3, 1, 40), (2, 1, 256))
    ):
        k_pool, v_pool = (_randn(dtype, slots, num_kv_heads, size) for _ in range(2))
        table = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, part in enumerate(torch.randperm(slots).split(lengths)):
            table[row, : len(part)] = part
        table[-1, :2] = torch.tensor([0, slots - 1])
        spans = [
            [(row, length - 1, length) for row, length in enumerate(lengths)],
            [(row, 0, length) for row, length in enumerate(lengths)],
            [(6, 500, 512), (0, 0, 1), (8, 3, 3), (8, 37, 600), (5, 510, 511)],
            [],
        ]
        for step in spans:
            queries = torch.tensor([stop - start for _, start, stop in step], dtype=torch.int64)
            rows = torch.tensor([row for row, _, _ in step], dtype=torch.int64)
            kv_lens = torch.tensor([stop for _, _, stop in step], dtype=torch.int64)
            q = _randn(dtype, int(queries.sum()), num_heads, size)
            yield attend(q, k_pool, v_pool, table, rows, queries, kv_lens, size**-0.5)
        for wrong in (slots, -1):
            broken = table.clone()
            broken[2, 63] = wrong
            one, length = torch.tensor([1]), torch.tensor([64])
            q = _randn(dtype, 1, num_heads, size)
            _refuses(lambda: attend(q, k_pool, v_pool, broken, torch.tensor([2]), one, length, 1.0))  # noqa: B023


def _sampling_rows(count: int, vocab: int) -> list[SamplingRow]:
    """Make rows that use every feature, with the first and the last token id in every list."""
    edges = [0, vocab - 1]
    shared = {"max_new_tokens": 9, "logit_bias": {0: 1.0, vocab - 1: -1.0}, "min_new_tokens": 1}
    features: list[dict] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.7, "top_p": 0.5, "top_k": vocab + 3},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    ]
    return [
        SamplingRow(
            SamplingParams(**shared | features[i % len(features)]),
            seed=i,
            end_ids=edges if vocab > 2 else (),
            prompt_ids=edges,
            output_ids=edges * (i % 3),
            top_logprobs=(0, 1, vocab + 2)[i % 3],
            chosen_ids=edges,
        )
        for i in range(count)
    ]


def samplers(ops: Ops) -> Iterator[torch.Tensor]:
    sampler = NativeSampler()
    for dtype, vocab, count in product(DTYPES, (1, 2, 15, 16, 17, 255, 257, 4097), (0, 1, 7)):
        rows = _sampling_rows(count, vocab)
        positions = torch.tensor([len(row.output_ids) for row in rows], dtype=torch.int64)
        sampled = sampler.sample(_randn(dtype, count, vocab), SamplingBatchInfo(rows, vocab), positions)
        last = torch.full((count,), vocab - 1)
        scored = sampler.score(_randn(dtype, count, vocab), last, 0.7, [0, vocab - 1], vocab + 2)
        for tensor in (*astuple(sampled), *astuple(scored)):
            yield tensor.nan_to_num(-9.0) if tensor.is_floating_point() else tensor  # NaN where none was asked for
        if count:
            wrong, logits = torch.full((count,), vocab), _randn(dtype, count, vocab)
            _refuses(lambda: sampler.score(logits, wrong, 1.0, [], 0))  # noqa: B023


def buckets(ops: Ops) -> Iterator[torch.Tensor]:
    """Take one tensor at an odd address by a box, by packed rows and by packed columns."""
    for (sent, held), rows, depth, turned in product(CASTS, (1, 16, 33, 70), (1, 17, 33, 600), (False, True)):
        content = _randn(sent, rows * depth).view(torch.uint8)
        source = torch.cat([torch.zeros(1, dtype=torch.uint8), content])
        strides = (1, rows) if turned else (depth, 1)
        codes = DTYPE_CODES[sent], INT8_BLOCKS_CODE if held is None else DTYPE_CODES[held]
        kept = held or torch.bfloat16
        places = [torch.zeros(rows * depth, dtype=kept), torch.zeros(rows * depth, dtype=kept)]
        moves = [(0, MoveKind.BOX, 0, 0, 0, rows, 0, depth, depth, 1, 0)]
        half = rows // 2
        moves.append((0, MoveKind.BOX, 1, half * kept.itemsize, half, rows - half, 0, depth, 1, rows, 0))
        if held is None:
            places.append(torch.ops.lockstep.empty_packed_w8([], rows, depth))
            moves.append((0, MoveKind.PACKED_W8, 2, 0, 0, rows, 0, depth, 0, 1, 0))
        elif held in DTYPES:
            places.append(torch.ops.lockstep.empty_packed([], rows, depth, held))
            places.append(torch.ops.lockstep.empty_packed([], depth, rows, held))
            moves.append((0, MoveKind.PACKED, 2, 0, 0, rows, 0, depth, 0, 1, 0))
            moves.append((0, MoveKind.PACKED_TRANSPOSED, 3, 0, 0, rows, 0, depth, 0, 1, 0))
        storages = [place.view(-1).view(torch.uint8) for place in places]
        tensors, table = torch.tensor([SpanTensor.whole(1, *codes, rows, depth, *strides)]), torch.tensor(moves)
        fingerprints, infinite = take_spans(source, tensors, table, storages)
        assert not infinite.any()
        yield from (fingerprints, *storages)
        _refuses(lambda: take_spans(source[1:], tensors, table, storages))  # noqa: B023
        for index in range(len(moves)):
            short = [storage[: -1 - 63 * (n > 1)] if n == index else storage for n, storage in enumerate(storages)]
            _refuses(lambda: take_spans(source, tensors, table, short))  # noqa: B023


OPERATORS = (matrices, routers, activations, delta_rules, experts, heads, latents, attention, samplers, buckets)


def digest() -> str:
    """Return the digest of every result with one thread; with two it must be the same."""
    ops, found = compiled_ops(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        digest = hashlib.sha256()
        for operator in OPERATORS:
            for result in operator(ops):
                assert result.dtype == torch.int64 or not result.isnan().any(), operator.__name__
                digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
        found.append(digest.hexdigest())
    assert found[0] == found[1], "one and two threads differ"
    return found[0]


if __name__ == "__main__":
    torch.ops.load_library(sys.argv[1])
    print(digest())
