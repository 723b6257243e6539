"""The stand-in of `deep_ep` keeps the package's own promises, so that tests against it count for the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.layers.moe.dispatchers.deep_ep_library import DeepEpApi, DeepEpShape, _ElasticGroup, make_buffer
from tests.deepep_stand_in import stand_in
from tests.nccl_stand_in import stand_in_transport
from tests.ranks import run_ranks

pytestmark = pytest.mark.full

# Four experts, two a rank; a token's first channel is 100 * rank + token.
IDS = [
    torch.tensor([[0, 1, 3], [2, 3, -1], [1, -1, -1]]),
    torch.tensor([[3, 0, -1], [-1, -1, -1], [1, 0, 2], [2, -1, -1]]),
]
WEIGHTS = [(ids.float() + 1) / 8 + rank for rank, ids in enumerate(IDS)]
MOST = 4
EVERYONE = (0, 1, 2, 100, 101, 102, 103)
ARRIVES = [[0, 2, 100, 102], [0, 1, 100, 102, 103]]  # on each rank, in the order of normal mode


def rows(rank: int, hidden_size: int) -> torch.Tensor:
    x = torch.zeros(len(IDS[rank]), hidden_size, dtype=torch.bfloat16)
    x[:, 0] = torch.arange(len(x)) + 100 * rank
    return x


def shape_for(hidden_size: int) -> DeepEpShape:
    return DeepEpShape(hidden_size, 4, 3, torch.bfloat16, 2, MOST)


def names(x: torch.Tensor) -> list[int]:
    return x[:, 0].int().tolist()


def chosen(name: int, rank: int) -> tuple[list[int], list[float]]:
    """Return the local ids on `rank` of the token with this name, and all its weights."""
    ids = IDS[name // 100][name % 100]
    return [int(e) - 2 * rank if e // 2 == rank else -1 for e in ids], WEIGHTS[name // 100][name % 100].tolist()


def on_ranks(work: Any) -> list[Any]:
    return run_ranks(ParallelLayout(tp_size=2), work, 20.0, stand_in_transport)


def normal_dispatch(parallel: Parallel) -> tuple[Any, Any, tuple[Any, ...]]:
    rank, library = parallel.tp.rank, stand_in(parallel.tp, "normal")
    buffer = make_buffer(library, DeepEpApi.NORMAL, shape_for(64), parallel.tp)
    per_rank, _, per_expert, in_rank, _ = layout = buffer.get_dispatch_layout(IDS[rank], 4)
    received = buffer.dispatch(
        rows(rank, 64),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=IDS[rank],
        topk_weights=WEIGHTS[rank],
    )
    return buffer, layout, received


def test_normal_mode_arrives_once_a_rank_by_source_and_token_with_zeroed_weights() -> None:
    def work(parallel: Parallel) -> Any:
        buffer, (per_rank, _, per_expert, in_rank, _), (x, ids, weights, counts, handle, _) = normal_dispatch(parallel)
        combined, _, _ = buffer.combine(x, handle)
        return (per_rank.tolist(), per_expert.tolist(), in_rank.tolist()), (names(x), ids, weights, counts), combined

    (layout, received, _), (_, other, _) = sums = on_ranks(work)
    assert layout == ([2, 2], [1, 2, 1, 2], [[True, True], [False, True], [True, False]])
    for rank, (arrived, ids, weights, counts) in enumerate((received, other)):
        assert arrived == ARRIVES[rank]
        assert counts == [3, 3]
        for name, token_ids, token_weights in zip(arrived, ids.tolist(), weights.tolist(), strict=True):
            wanted_ids, wanted_weights = chosen(name, rank)
            assert token_ids == wanted_ids
            assert token_weights == [w if e >= 0 else 0.0 for e, w in zip(wanted_ids, wanted_weights, strict=True)]
    for rank, (_, _, combined) in enumerate(sums):
        times = [sum(100 * rank + token in names for names in ARRIVES) for token in range(len(IDS[rank]))]
        assert torch.equal(combined, rows(rank, 64) * torch.tensor(times, dtype=torch.bfloat16)[:, None])


def low_latency(parallel: Parallel, seed: int, times: int = 1, **settings: Any) -> tuple[Any, list[Any]]:
    rank = parallel.tp.rank
    buffer = make_buffer(stand_in(parallel.tp, "1.2", seed), DeepEpApi.LOW_LATENCY, shape_for(2048), parallel.tp)
    return buffer, [buffer.low_latency_dispatch(rows(rank, 2048), IDS[rank], MOST, 4, **settings) for _ in range(times)]


def test_low_latency_mode_packs_a_row_for_each_choice_in_any_order() -> None:
    orders = set()
    for seed in range(4):

        def work(parallel: Parallel, seed: int = seed) -> Any:
            buffer, [(x, counts, handle, *_)] = low_latency(parallel, seed, use_fp8=False)
            rank = parallel.tp.rank
            return x, counts, handle, buffer.low_latency_combine(x, IDS[rank], WEIGHTS[rank], handle)[0]

        for rank, (x, counts, (src_info, layout_range, *_), combined) in enumerate(on_ranks(work)):
            assert x.shape == (2, 2 * MOST, 2048)
            for local, count in enumerate(counts.tolist()):
                arrived = names(x[local, :count])
                assert sorted(arrived) == [name for name in EVERYONE if local in chosen(name, rank)[0]]
                assert x[local, count:].isnan().all()
                assert src_info[local, :count].tolist() == [name % 100 for name in arrived]
                for source in range(2):
                    begin, number = divmod(int(layout_range[local, source]), 1 << 32)
                    assert all(name // 100 == source for name in arrived[begin : begin + number])
                orders.add((rank, local, *arrived))
            sums = (WEIGHTS[rank] * (IDS[rank] >= 0)).sum(1, keepdim=True)
            assert torch.equal(combined, (rows(rank, 2048).float() * sums).bfloat16())
    assert len(orders) > 4


def test_low_latency_results_live_until_the_second_next() -> None:
    def work(parallel: Parallel) -> Any:
        _, results = low_latency(parallel, 0, times=3, use_fp8=False)
        return [result[0][0, 0].isnan().any().item() for result in results]

    assert on_ranks(work) == [[True, False, False]] * 2


def test_a_third_live_low_latency_result_is_refused() -> None:
    def work(parallel: Parallel) -> None:
        buffer, results = low_latency(parallel, 0, times=3, use_fp8=False)
        rank = parallel.tp.rank
        for x, _, handle, *_ in results[1:]:
            buffer.low_latency_combine(x, IDS[rank], WEIGHTS[rank], handle)
        x, _, handle, *_ = results[0]
        with pytest.raises(AssertionError, match="third live low-latency result"):
            buffer.low_latency_combine(x, IDS[rank], WEIGHTS[rank], handle)

    on_ranks(work)


def test_handles_of_other_modes_are_refused() -> None:
    def work(parallel: Parallel) -> None:
        rank = parallel.tp.rank
        buffer, [(x, _, packed, *_)] = low_latency(parallel, 0, use_fp8=False)
        elastic = elastic_buffer(parallel, 0, deterministic=True)
        received, _, _, handle, _ = elastic.dispatch(rows(rank, 256), IDS[rank], WEIGHTS[rank], num_experts=4)
        for combine, other in (
            (
                buffer.low_latency_combine,
                {"x": x, "topk_idx": IDS[rank], "topk_weights": WEIGHTS[rank], "handle": handle},
            ),
            (buffer.combine, {"x": x.flatten(0, 1), "handle": packed}),
            (elastic.combine, {"x": received, "handle": packed}),
        ):
            with pytest.raises(AssertionError, match="another mode"):
                combine(**other)

    on_ranks(work)


def elastic_buffer(parallel: Parallel, seed: int, deterministic: bool) -> Any:
    library = stand_in(parallel.tp, "2.1", seed)
    return library.ElasticBuffer(_ElasticGroup(parallel.tp), MOST, 256, 3, deterministic, explicitly_destroy=True)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_elastic_rows_come_once_a_rank_with_all_their_weights(deterministic: bool, waits: bool) -> None:
    orders = set()
    for seed in range(4):

        def work(parallel: Parallel, seed: int = seed) -> Any:
            rank, buffer = parallel.tp.rank, elastic_buffer(parallel, seed, deterministic)
            x, ids, weights, handle, _ = buffer.dispatch(
                rows(rank, 256), IDS[rank], WEIGHTS[rank], num_experts=4, do_cpu_sync=waits
            )
            return x, ids, weights, handle, buffer.combine(x, handle)[0]

        for rank, (x, ids, weights, handle, combined) in enumerate(on_ranks(work)):
            wanted = ARRIVES[rank]
            count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            assert count == len(wanted) and len(x) == (count if waits else 2 * MOST)
            assert x[count:].isnan().all() and (ids[count:] >= 4).all() and weights[count:].isnan().all()
            arrived = names(x[:count])
            assert [name // 100 for name in arrived] == [name // 100 for name in wanted]
            assert arrived == wanted if deterministic else sorted(arrived) == wanted
            for name, token_ids, token_weights in zip(arrived, ids.tolist(), weights.tolist(), strict=False):
                assert (token_ids, token_weights) == chosen(name, rank)
            times = [sum(100 * rank + token in names for names in ARRIVES) for token in range(len(IDS[rank]))]
            assert torch.equal(combined, rows(rank, 256) * torch.tensor(times, dtype=torch.bfloat16)[:, None])
            orders.add((rank, *arrived))
    assert len(orders) == 2 if deterministic else len(orders) > 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_idx": torch.tensor([[1, 1, -1]])}, "names an expert twice"),
        ({"num_experts": None}, "num_experts"),
        ({"num_max_tokens_per_rank": MOST + 1}, "room for 4"),
        ({"x": torch.zeros(1, 512, dtype=torch.bfloat16)}, "512"),
    ],
)
def test_elastic_mode_refuses_what_the_device_would_not_survive(changes: dict[str, Any], message: str) -> None:
    def work(parallel: Parallel) -> None:
        buffer = elastic_buffer(parallel, 0, True)
        call: dict[str, Any] = {
            "x": rows(0, 256)[:1],
            "topk_idx": torch.tensor([[1, -1, -1]]),
            "topk_weights": torch.ones(1, 3),
            "num_experts": 4,
        }
        with pytest.raises(AssertionError, match=message):
            buffer.dispatch(**call | changes)

    on_ranks(work)


def test_low_latency_mode_casts_unless_told_not_to() -> None:
    def work(parallel: Parallel) -> Any:
        _, [((x, scales), counts, *_)] = low_latency(parallel, 0)
        count = int(counts[0])
        restored = x[0, :count].float().unflatten(1, (-1, 128)) * scales[0, :count].unsqueeze(-1)
        return x.dtype, scales.shape, scales.stride()[1:], restored.flatten(1)[:, 0].round().int().tolist()

    for dtype, shape, strides, arrived in on_ranks(work):
        assert (dtype, shape, strides) == (torch.float8_e4m3fn, (2, 2 * MOST, 16), (1, 2 * MOST))
        assert arrived


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": lambda x: x.float()}, "bfloat16 rows, not torch.float32"),
        ({"topk_idx": lambda ids: ids.int()}, "int64 ids, not torch.int32"),
        ({"topk_weights": lambda weights: weights.bfloat16()}, "float32 weights, not torch.bfloat16"),
    ],
)
def test_normal_mode_refuses_what_the_device_would_not_survive(changes: dict[str, Any], message: str) -> None:
    def work(parallel: Parallel) -> None:
        buffer, (per_rank, _, per_expert, in_rank, _), _ = normal_dispatch(parallel)
        rank = parallel.tp.rank
        call: dict[str, Any] = {"x": rows(rank, 64), "topk_idx": IDS[rank], "topk_weights": WEIGHTS[rank]}
        call |= {name: change(call[name]) for name, change in changes.items()}
        with pytest.raises(AssertionError, match=message):
            buffer.dispatch(
                num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, **call
            )

    on_ranks(work)


def test_low_latency_mode_refuses_more_tokens_than_it_has_places_for() -> None:
    def work(parallel: Parallel) -> None:
        buffer, _ = low_latency(parallel, 0, use_fp8=False)
        x, ids = rows(0, 2048), IDS[0]
        with pytest.raises(AssertionError):
            buffer.low_latency_dispatch(torch.cat((x, x)), torch.cat((ids, ids)), MOST, 4, use_fp8=False)

    on_ranks(work)
