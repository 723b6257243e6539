"""The torch backend against attention written out, over random step layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.attention.registry import ATTENTION_BACKENDS, create_attention_backend
from rollout.attention.torch_native import ROWS_FORM_MAX_QUERIES, SMALL_GATHER_ROWS, bucket_by_length
from rollout.core.errors import StartupError
from rollout.core.forward_batch import DecodeRows, ForwardBatch
from rollout.core.specs.layer_specs import FullKV
from rollout.memory.kv_pool import KVPool
from tests.tiers import examples

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


class _Sequences:
    """Whole keys and values of some requests, scattered over a pool whose other slots are NaN.

    With a `window`, keys and values of positions that no token of the step sees are NaN, too.
    """

    def __init__(self, lengths: list[int], dtype: torch.dtype = torch.float64, window: int | None = None) -> None:
        self.lengths, self.window = lengths, window
        generator = torch.Generator().manual_seed(sum(lengths))
        longest = max(lengths)
        self.pool = KVPool(len(lengths) * longest + 3, [FullKV(KV_HEADS, HEAD_DIM)], dtype)
        self.pool.k[0].fill_(float("nan"))
        self.pool.v[0].fill_(float("nan"))
        slots = torch.randperm(len(lengths) * longest, generator=generator)
        self.req_to_token = slots.view(len(lengths), longest)
        shape = (len(lengths), longest, KV_HEADS, HEAD_DIM)
        self.k = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        self.v = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        self.q = torch.randn(len(lengths), longest, HEADS, HEAD_DIM, generator=generator).to(dtype)

    def attend(self, computed: list[int], num_extends: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from the last `computed[r]` tokens of each request in one step; the first `num_extends` ones extend.

        Return the backend's output and the right one, both [T, H * hd].
        """
        spans = [range(length - new, length) for length, new in zip(self.lengths, computed, strict=True)]
        for request, span in enumerate(spans):
            seen = slice(self._first_seen(span.start), span.start)
            self._store(self.req_to_token[request, seen], self.k[request, seen], self.v[request, seen])
        decode_rows = torch.arange(num_extends, len(spans))
        decode_lens = torch.tensor(self.lengths[num_extends:], dtype=torch.int64)
        batch = ForwardBatch(
            input_ids=torch.zeros(sum(computed), dtype=torch.int64),
            positions=torch.tensor([position for span in spans for position in span]),
            out_cache_loc=torch.cat([self.req_to_token[r, s.start : s.stop] for r, s in enumerate(spans)]),
            req_to_token=self.req_to_token,
            extend_req_pool_indices=list(range(num_extends)),
            extend_prefix_lens=[span.start for span in spans[:num_extends]],
            extend_lens=computed[:num_extends],
            decode=DecodeRows(decode_rows, decode_lens, decode_rows, decode_lens),
            logits_rows=torch.empty(0, dtype=torch.int64),
        )
        backend = create_attention_backend("torch_native", self.pool)
        backend.plan(batch)
        q, k, v = (torch.cat([x[r, s.start : s.stop] for r, s in enumerate(spans)]) for x in (self.q, self.k, self.v))
        self._store(batch.out_cache_loc, k, v)
        return backend.attend(0, q, window=self.window), torch.cat(
            [self._plain(r, span) for r, span in enumerate(spans)]
        )

    def _first_seen(self, position: int) -> int:
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def _store(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.pool.k[0].index_copy_(0, slots, k)
        self.pool.v[0].index_copy_(0, slots, v)

    def _plain(self, request: int, span: range) -> torch.Tensor:
        rows = []
        for position in span:
            heads, seen = [], slice(self._first_seen(position), position + 1)
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                k = self.k[request, seen, kv_head].double()
                scores = k @ self.q[request, position, head].double() / HEAD_DIM**0.5
                heads.append(scores.softmax(0) @ self.v[request, seen, kv_head].double())
            rows.append(torch.cat(heads))
        return torch.stack(rows)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_random_step_layouts_agree_with_attention_written_out(data: st.DataObject) -> None:
    num_extends = data.draw(st.integers(0, 4), "extends")
    num_decodes = data.draw(st.integers(0 if num_extends else 1, 4), "decodes")
    pairs = data.draw(
        st.lists(
            st.tuples(st.sampled_from([0, 0, 3, 7, 11]), st.sampled_from([1, 2, 5, 9])),
            min_size=num_extends,
            max_size=num_extends,
        )
    )
    decode_lens = data.draw(st.lists(st.integers(1, 30), min_size=num_decodes, max_size=num_decodes))
    window = data.draw(st.sampled_from([None, 1, 4, 40]), "window")
    sequences = _Sequences([prefix + new for prefix, new in pairs] + decode_lens, window=window)
    ours, expected = sequences.attend([new for _, new in pairs] + [1] * num_decodes, num_extends)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)],
    ids=str,
)
def test_every_dtype_agrees_with_float64_within_its_rounding(dtype: torch.dtype, tolerance: float) -> None:
    ours, expected = _Sequences([9, 14, 14, 20, 3], dtype).attend([9, 4, 4, 1, 1], 3)
    torch.testing.assert_close(ours.double(), expected, atol=tolerance, rtol=tolerance)


def test_long_chunk_on_a_prefix_takes_the_other_form() -> None:
    new = ROWS_FORM_MAX_QUERIES + 1
    ours, expected = _Sequences([5 + new, 5 + new]).attend([new, new], 2)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)


def test_results_of_sdpa_may_lie_in_memory_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """First runs on a GPU: SDPA's results are contiguous as [X, Q, H, hd] on CUDA, as [X, H, Q, hd] on a CPU."""
    usual = functional.scaled_dot_product_attention

    def as_on_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
        return usual(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", as_on_cuda)
    many = ROWS_FORM_MAX_QUERIES + 1
    for lengths, computed, num_extends in (
        ([9, 14, 14, 20, 3], [9, 4, 4, 1, 1], 3),  # without a prefix, few queries on one, decoding
        ([5 + many, 5 + many], [many, many], 2),
        ([SMALL_GATHER_ROWS // 4, 2, 3, 1, 5, 2, 700], [1] * 7, 0),
    ):
        ours, expected = _Sequences(lengths).attend(computed, num_extends)
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)


def test_decode_lengths_far_apart_are_bucketed() -> None:
    lengths = [SMALL_GATHER_ROWS // 4, 2, 3, 1, 5, 2, 700]
    assert len(bucket_by_length(lengths)) > 1
    ours, expected = _Sequences(lengths).attend([1] * len(lengths), 0)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.mutant
def test_a_wrong_slot_is_noticed() -> None:
    sequences = _Sequences([12, 7])
    _, expected = sequences.attend([1, 1], 0)
    sequences.k[0, 4] += 1e-3
    ours, _ = sequences.attend([1, 1], 0)
    assert (ours - expected).abs().max() > 1e-6


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_buckets_partition_and_bound_the_padding(lengths: list[int]) -> None:
    buckets = bucket_by_length(lengths)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    padded = sum(len(bucket) * max(lengths[i] for i in bucket) for bucket in buckets)
    assert padded <= max(2 * sum(lengths), SMALL_GATHER_ROWS)


def test_unknown_backend_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match="torch_native"):
        create_attention_backend("nope", KVPool(4, [FullKV(1, 4)], torch.float32))
    assert "torch_native" in ATTENTION_BACKENDS
