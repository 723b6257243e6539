"""The compiled attention operator and its backend: against float64 and torch, and bit for bit against itself.

Shapes: T queries, N sequences, H query heads, Hkv key/value heads, hd size of a query and a key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.attention.base import AttentionBackend
from rollout.attention.native_cpu import NativeCpuBackend
from rollout.attention.registry import create_attention_backend
from rollout.core.errors import StartupError
from rollout.core.forward_batch import DecodeRows, ForwardBatch
from rollout.core.specs.layer_specs import FullKV, KVKind, LatentKV
from rollout.memory.kv_pool import KVPool
from tests.forward_harness import ForwardHarness
from tests.invariance import compute_threads
from tests.kernels import error, native_ops, rows_are_independent
from tests.model_zoo import load_tiny, tiny_checkpoint
from tests.tiers import examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative error in the 2-norm: a few roundings of the result, and in bfloat16 of the probabilities.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
HEADS = [(4, 4, 16), (8, 1, 32), (16, 4, 64), (4, 2, 128), (6, 2, 40), (3, 1, 8), (2, 1, 256)]  # H, Hkv, hd
# Around a vector, a block of 128 and a segment of 512 positions.
LENGTHS = [1, 16, 65, 127, 128, 129, 511, 513, 1100]


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    native_ops()


class Sequences:
    """Queries, keys and values of whole sequences, the latter scattered over a pool whose other slots are NaN."""

    def __init__(
        self,
        lengths: list[int],
        dtype: torch.dtype,
        heads: tuple[int, int, int] = (16, 4, 64),
        scale: float = 1.0,
        kind: KVKind | None = None,
        window: int | None = None,
        has_sinks: bool = False,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.lengths, longest = lengths, max(lengths)
        self.window = window
        generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
        self.pool = KVPool(len(lengths) * longest + 9, [kind or FullKV(num_kv_heads, head_dim)], dtype)
        self.sinks = (2 * torch.randn(num_heads, generator=generator)).to(dtype) if has_sinks else None
        self.k_pool, self.v_pool = self.pool.k[0].fill_(torch.nan), self.pool.v[0].fill_(torch.nan)
        slots = torch.randperm(self.k_pool.shape[0], generator=generator)
        self.req_to_token = slots[: len(lengths) * longest].view(len(lengths), longest)
        for row, length in enumerate(lengths):
            for pool in (self.v_pool, self.k_pool):
                values = torch.randn(length, *pool.shape[1:], generator=generator)
                pool[self.req_to_token[row, :length]] = values.to(dtype)
        shape = (len(lengths), longest, num_heads, head_dim)
        self.q = (torch.randn(shape, generator=generator) * scale).to(dtype)

    def keys(self, row: int, length: int) -> torch.Tensor:
        return self.k_pool[self.req_to_token[row, :length]]

    def values(self, row: int, length: int) -> torch.Tensor:
        return self.v_pool[self.req_to_token[row, :length]]

    def attend(self, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        """Attend once for all spans (row, start, stop): queries at positions `start .. stop - 1` of a row."""
        q = [self.q[row, start:stop] for row, start, stop in spans]
        return torch.ops.lockstep.paged_attention(
            torch.cat(q) if q else self.q[0, :0],
            self.k_pool,
            self.v_pool,
            self.req_to_token,
            torch.tensor([row for row, _, _ in spans], dtype=torch.int64),
            torch.tensor([stop - start for _, start, stop in spans], dtype=torch.int64),
            torch.tensor([stop for _, _, stop in spans], dtype=torch.int64),
            self.q.shape[-1] ** -0.5,
            self.window,
            self.sinks,
        )

    def exact(self, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        """Compute the same attention in float64, written out."""
        return torch.cat([self._exact(*span) for span in spans])

    def _exact(self, row: int, start: int, stop: int) -> torch.Tensor:
        q = self.q[row, start:stop].double()
        group = q.shape[1] // self.k_pool.shape[1]
        k, v = (x(row, stop).double().repeat_interleave(group, 1) for x in (self.keys, self.values))
        scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
        ago = torch.arange(start, stop)[:, None] - torch.arange(stop)
        masked = (ago < 0) | (ago >= (self.window or stop))
        scores = scores.masked_fill(masked, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, stop - start, 1)), -1)
        return torch.einsum(
            "hij,jhd->ihd", scores.softmax(-1)[..., :stop], v.masked_fill(masked.all(0)[:, None, None], 0)
        )

    def whole(self) -> list[tuple[int, int, int]]:
        return [(row, 0, length) for row, length in enumerate(self.lengths)]

    def last(self) -> list[tuple[int, int, int]]:
        return [(row, length - 1, length) for row, length in enumerate(self.lengths)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_agrees_with_float64(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    sequences = Sequences(LENGTHS, dtype, heads)
    mixed = [(8, 1060, 1100), (2, 0, 63), (6, 300, 511), (0, 0, 1)]
    for spans in (sequences.last(), sequences.whole(), mixed):
        out, exact = sequences.attend(spans), sequences.exact(spans)
        assert out.dtype == dtype and out.shape == exact.shape
        assert error(out, exact) < TOLERANCES[dtype]
        assert (out.double() - exact).abs().max() < 8 * TOLERANCES[dtype]


# The needs of GPT-OSS and DeepSeek-V3: H, Hkv, hd; elements kept of a token; window; whether there are sinks.
SPECIAL: dict[str, dict[str, Any]] = {
    "window": {"heads": (8, 2, 64), "window": 128},
    "short window": {"heads": (4, 4, 16), "window": 3},
    "window and sinks": {"heads": (16, 2, 40), "window": 150, "has_sinks": True},
    "long window": {"heads": (4, 2, 64), "window": 600, "has_sinks": True},
    "sinks": {"heads": (8, 1, 64), "has_sinks": True},
    "latent": {"heads": (16, 1, 576), "kind": LatentKV(512, 64)},
    "small latent": {"heads": (3, 1, 56), "kind": LatentKV(40, 16)},
    "two latent heads": {"heads": (2, 1, 192), "kind": LatentKV(128, 64)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.full if x == "latent" else ()) for x in SPECIAL])
def test_windows_sinks_and_latents(dtype: torch.dtype, name: str) -> None:
    """They agree with float64, and have the same bits in any chunks, batch and number of threads."""
    sequences = Sequences([1300, 65, 1, 513, 130], dtype, **SPECIAL[name])
    spans = sequences.whole()
    whole = sequences.attend(spans)
    # A latent's scores are sums over many elements, of which some are values as well.
    assert error(whole, sequences.exact(spans)) < 2 * TOLERANCES[dtype]
    first = whole[:1300]
    for chunk in (1, 7, 64, 200):
        steps = [sequences.attend([(0, start, min(1300, start + chunk))]) for start in range(0, 1300, chunk)]
        assert torch.equal(torch.cat(steps), first), f"chunks of {chunk}"
    mixed = sequences.attend([(3, 500, 513), (1, 0, 65), (0, 1299, 1300), (4, 127, 130)])
    parts = whole.split(sequences.lengths)
    assert torch.equal(mixed, torch.cat([parts[3][500:], parts[1], parts[0][-1:], parts[4][-3:]]))
    with compute_threads(2):
        assert torch.equal(sequences.attend(spans), whole)
        for start in (1299, 1290, 640, 511):
            assert torch.equal(sequences.attend([(0, start, 1300)]), first[start:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [1299, 1290, 1000])
def test_what_lies_before_the_window_is_not_read(dtype: torch.dtype, start: int) -> None:
    for window in (1, 128, 150, 520):
        sequences = Sequences([1300], dtype, (8, 2, 64), window=window, has_sinks=True)
        expected = sequences.attend([(0, start, 1300)])
        gone = sequences.req_to_token[0, : start + 1 - window]
        for pool in (sequences.k_pool, sequences.v_pool):
            pool[gone] = torch.nan
        sequences.req_to_token[0, : start + 1 - window] = -1
        assert torch.equal(sequences.attend([(0, start, 1300)]), expected)
        last_seen = sequences.req_to_token[0, start + 1 - window : start + 2 - window]
        sequences.v_pool[last_seen] += 1
        assert not torch.equal(sequences.attend([(0, start, 1300)]), expected)


def test_a_sink_of_any_size() -> None:
    """Under a large sink nothing is left of the values; under a small one all of them are."""
    sequences = Sequences([300], torch.float32, (4, 2, 16), has_sinks=True)
    assert sequences.sinks is not None
    for value, share in ((-1e4, 1.0), (-torch.inf, 1.0), (1e4, 0.0)):
        sequences.sinks.fill_(value)
        out = sequences.attend(sequences.whole())
        sinks, sequences.sinks = sequences.sinks, None
        plain = sequences.attend(sequences.whole())
        sequences.sinks = sinks
        torch.testing.assert_close(out, plain * share, rtol=1e-6, atol=1e-30)


@pytest.mark.mutant
def test_one_wrong_key_value_or_position_is_noticed() -> None:
    sequences = Sequences([70, 66], torch.float32)
    spans = sequences.last()
    exact = sequences.exact(spans)
    for pool in (sequences.k_pool, sequences.v_pool):
        element = pool[sequences.req_to_token[0, 64]]
        element += 1e-2
        pool[sequences.req_to_token[0, 64]] = element
        assert error(sequences.attend(spans), exact) > 10 * TOLERANCES[torch.float32]
        pool[sequences.req_to_token[0, 64]] = element - 1e-2
    assert error(sequences.attend([(0, 69, 70), (1, 64, 65)]), exact) > 10 * TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(16, 4, 64), (5, 5, 16), (8, 1, 40), (4, 2, 128)], ids=str)
def test_a_token_has_the_same_bits_in_any_chunking_batch_and_number_of_threads(
    dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    sequences = Sequences([700, 65, 1, 513, 130], dtype, heads)
    whole = sequences.attend(sequences.whole()).split(sequences.lengths)
    for chunk in (1, 7, 64, 200):
        starts = range(0, 700, chunk)
        steps = [sequences.attend([(0, start, min(700, start + chunk))]) for start in starts]
        assert torch.equal(torch.cat(steps), whole[0]), f"chunks of {chunk}"
    decoded = sequences.attend(sequences.last())
    assert torch.equal(decoded, torch.stack([rows[-1] for rows in whole]))
    # A decoding sequence next to extending ones, with and without a prefix.
    mixed = sequences.attend([(3, 500, 513), (1, 0, 65), (0, 699, 700), (4, 129, 130)])
    assert torch.equal(mixed, torch.cat([whole[3][500:], whole[1], whole[0][-1:], whole[4][-1:]]))
    spans = [(row, position, position + 1) for row in (0, 3) for position in range(3, 513, 60)]
    assert rows_are_independent(lambda picks: sequences.attend([spans[i] for i in picks]), len(spans))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for _ in range(3):
            assert torch.equal(sequences.attend(sequences.whole()), torch.cat(whole))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(2, 2, 16), (4, 2, 16), (8, 2, 16)], ids=str)
def test_few_positions_on_both_sides_of_an_edge(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    """A hit in the prefix cache may leave two tokens to compute, one of them the first of a block."""
    sequences = Sequences([700], dtype, heads)
    whole = sequences.attend(sequences.whole())
    assert error(whole, sequences.exact(sequences.whole())) < TOLERANCES[dtype]
    for edge in (128, 256, 512, 640):
        for count in range(2, 7):
            for start in range(edge - count + 1, edge):
                few = sequences.attend([(0, start, start + count)])
                assert torch.equal(few, whole[start : start + count]), f"{start} .. {start + count - 1}"


@pytest.mark.mutant
def test_a_split_that_depends_on_the_batch_is_noticed() -> None:
    """Flash-Decoding often cuts the keys into more pieces when there are fewer requests."""
    sequences = Sequences([600] * 12, torch.float32)
    spans = sequences.last()

    def batch_dependent(picks: torch.Tensor) -> torch.Tensor:
        return torch.stack([_in_pieces(sequences, int(row), max(1, 8 // len(picks))) for row in picks])

    reference = sequences.exact(spans)
    assert error(batch_dependent(torch.arange(12)), reference) < TOLERANCES[torch.float32]
    assert not rows_are_independent(batch_dependent, 12)
    assert rows_are_independent(lambda picks: sequences.attend([spans[i] for i in picks]), 12)


def _in_pieces(sequences: Sequences, row: int, pieces: int) -> torch.Tensor:
    """Compute the output of the last token [H, hd] with a softmax of `pieces` pieces, combined at the end."""
    length = sequences.lengths[row]
    group = sequences.q.shape[2] // sequences.k_pool.shape[1]
    q = sequences.q[row, length - 1]
    k, v = (x(row, length).repeat_interleave(group, 1) for x in (sequences.keys, sequences.values))
    scores = torch.einsum("hd,jhd->hj", q, k) * q.shape[-1] ** -0.5
    maxima, sums, totals = [], [], []
    for part, values in zip(scores.chunk(pieces, 1), v.chunk(pieces), strict=True):
        maxima.append(part.amax(1))
        weights = (part - maxima[-1][:, None]).exp()
        sums.append(weights.sum(1))
        totals.append(torch.einsum("hj,jhd->hd", weights, values))
    factors = (torch.stack(maxima) - torch.stack(maxima).amax(0)).exp()
    denominator = (factors * torch.stack(sums)).sum(0)
    return (factors[..., None] * torch.stack(totals)).sum(0) / denominator[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_huge_scores_do_not_overflow(dtype: torch.dtype) -> None:
    """One key has all the weight and an unshifted exponential would overflow.  In float32 a score is known to 1e-4."""
    sequences = Sequences([600], dtype, (4, 2, 64), scale=300.0)
    spans = sequences.whole()
    out = sequences.attend(spans)
    assert out.isfinite().all()
    assert error(out, sequences.exact(spans)) < max(1e-4, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_minus_infinity(dtype: torch.dtype) -> None:
    """A block, a segment or single keys with such scores weigh 0.  If all keys have them, the output is NaN."""
    sequences = Sequences([1100], dtype, (2, 1, 16))
    sequences.q[..., 0] = 1.0
    for hidden in (range(64), range(512), range(512, 1024), (5, 700, 1099)):
        kept = sequences.k_pool.clone()
        sequences.k_pool[sequences.req_to_token[0, list(hidden)], :, 0] = -torch.inf
        out, exact = sequences.attend(sequences.last()), sequences.exact(sequences.last())
        assert exact.isfinite().all() and error(out, exact) < TOLERANCES[dtype]
        assert torch.equal(sequences.attend([(0, 1000, 1100)])[-1:], out)
        sequences.k_pool.copy_(kept)
    sequences.k_pool[..., 0] = -torch.inf
    assert sequences.attend(sequences.last()).isnan().all()


def test_a_nan_query_spoils_its_own_row_only() -> None:
    sequences = Sequences([130], torch.bfloat16)
    before = sequences.attend([(0, 0, 130)])
    sequences.q[0, 70, 3, 5] = torch.nan
    after = sequences.attend([(0, 0, 130)])
    assert after[70, 3].isnan().all()
    after[70, 3] = before[70, 3]
    assert torch.equal(after, before)


def test_requests_without_queries_give_no_rows() -> None:
    sequences = Sequences([5, 3], torch.bfloat16)
    assert sequences.attend([]).shape == (0, 16, 64)
    out = sequences.attend([(1, 3, 3), (0, 4, 5), (1, 0, 0)])
    assert torch.equal(out, sequences.attend([(0, 4, 5)]))


def test_queries_and_pools_may_be_strided() -> None:
    sequences = Sequences([80], torch.bfloat16)
    expected = sequences.attend([(0, 0, 80)])
    for name in ("k_pool", "v_pool", "q"):
        plain = getattr(sequences, name)
        wide = torch.full((*plain.shape[:-2], plain.shape[-2] + 3, plain.shape[-1] + 5), torch.nan, dtype=plain.dtype)
        wide[..., 1:-2, 2:-3] = plain
        setattr(sequences, name, wide[..., 1:-2, 2:-3])
    q, kv, lens = sequences.q[0], (sequences.k_pool, sequences.v_pool), torch.tensor([80])
    row = torch.tensor([0])
    out = torch.ops.lockstep.paged_attention(q, *kv, sequences.req_to_token, row, lens, lens, 64**-0.5)
    assert torch.equal(out, expected)


def _arguments(**changes: object) -> dict[str, object]:
    lens = torch.tensor([2])
    given = {"q": torch.ones(2, 4, 16), "k_pool": torch.ones(9, 2, 16), "v_pool": torch.ones(9, 2, 16)}
    table = {"req_to_token": torch.arange(6).view(2, 3), "rows": torch.tensor([1]), "query_lens": lens, "kv_lens": lens}
    return {**given, **table, "scale": 0.25, **changes}


@pytest.mark.parametrize(
    ("changes", "error_type", "message"),
    [
        ({"q": torch.ones(2, 4, 12)}, ValueError, "head size"),
        ({"q": torch.ones(2, 3, 16)}, ValueError, "3 query heads over 2"),
        ({"q": torch.ones(3, 4, 16)}, ValueError, "2 queries, q has 3"),
        ({"q": torch.ones(2, 4, 16, dtype=torch.bfloat16)}, TypeError, "differ in dtype"),
        ({"v_pool": torch.ones(8, 2, 16)}, ValueError, "differ in shape"),
        ({"v_pool": torch.ones(9, 2, 12)}, ValueError, "value size 12"),
        ({"window": 0}, ValueError, "window"),
        ({"sinks": torch.ones(2)}, ValueError, "one sink a query head"),
        ({"sinks": torch.ones(4, dtype=torch.bfloat16)}, TypeError, "sinks differ in dtype"),
        ({"req_to_token": torch.full((2, 3), 9)}, IndexError, "slot 9 is not one of 9"),
        ({"req_to_token": torch.full((2, 3), -1)}, IndexError, "slot -1"),
        ({"req_to_token": torch.zeros(2, 3, dtype=torch.int32)}, TypeError, "int64"),
        ({"rows": torch.tensor([2])}, IndexError, "row 2"),
        ({"kv_lens": torch.tensor([1])}, ValueError, "2 queries, 1 keys"),
        ({"kv_lens": torch.tensor([4])}, ValueError, "4 keys, 3 positions"),
        ({"kv_lens": torch.tensor([2, 2])}, ValueError, "one size"),
        ({"scale": 0.0}, ValueError, "scale"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    changes: dict[str, object], error_type: type[Exception], message: str
) -> None:
    torch.ops.lockstep.paged_attention(**_arguments())
    with pytest.raises(error_type, match=message):
        torch.ops.lockstep.paged_attention(**_arguments(**changes))


def test_attention_refuses_float64_tensors() -> None:
    double = {name: torch.ones(2, 4, 16, dtype=torch.float64) for name in ("q", "k_pool", "v_pool")}
    with pytest.raises(TypeError, match="Double"):
        torch.ops.lockstep.paged_attention(**_arguments(**double))


def test_a_wrong_slot_found_by_another_thread_is_an_error_too() -> None:
    sequences = Sequences([600] * 6, torch.float32)
    sequences.req_to_token[5, 599] = sequences.k_pool.shape[0]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(IndexError):
            sequences.attend(sequences.last())
    finally:
        torch.set_num_threads(before)


def _step(
    sequences: Sequences, computed: list[int], num_extends: int, backend: AttentionBackend, scale: float | None = None
) -> torch.Tensor:
    """Run one step over the last `computed[r]` tokens of each request; the first `num_extends` requests extend."""
    lengths = sequences.lengths
    starts = [length - new for length, new in zip(lengths, computed, strict=True)]
    positions = torch.cat([torch.arange(*span) for span in zip(starts, lengths, strict=True)])
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(computed))
    decode_rows = torch.arange(num_extends, len(lengths))
    decode_lens = torch.tensor(lengths[num_extends:], dtype=torch.int64)
    batch = ForwardBatch(
        input_ids=torch.zeros(sum(computed), dtype=torch.int64),
        positions=positions,
        out_cache_loc=sequences.req_to_token[rows, positions],
        req_to_token=sequences.req_to_token,
        extend_req_pool_indices=list(range(num_extends)),
        extend_prefix_lens=starts[:num_extends],
        extend_lens=computed[:num_extends],
        decode=DecodeRows(decode_rows, decode_lens, decode_rows, decode_lens),
        logits_rows=torch.empty(0, dtype=torch.int64),
    )
    backend.plan(batch)
    return backend.attend(0, sequences.q[rows, positions], scale, sequences.window, sequences.sinks)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_backend_agrees_with_torch_on_any_layout(data: st.DataObject) -> None:
    num_extends = data.draw(st.integers(0, 3), "extends")
    num_decodes = data.draw(st.integers(0 if num_extends else 1, 3), "decodes")
    pair = st.tuples(st.sampled_from([0, 0, 3, 63, 140]), st.sampled_from([1, 2, 9, 65]))
    pairs = data.draw(st.lists(pair, min_size=num_extends, max_size=num_extends), "prefix and extend lengths")
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=num_decodes, max_size=num_decodes), "decode lengths")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    window = data.draw(st.sampled_from([None, None, 1, 20, 128]), "window")
    kind = data.draw(st.sampled_from([FullKV(2, 16), LatentKV(16, 8)]), "kind")
    has_sinks, scale = data.draw(st.booleans(), "sinks"), data.draw(st.sampled_from([None, 0.3]), "scale")
    heads = (4, kind.num_heads, kind.key_size)
    sequences = Sequences([sum(x) for x in pairs] + lengths, dtype, heads, 1.0, kind, window, has_sinks)
    computed = [new for _, new in pairs] + [1] * num_decodes
    backends = [create_attention_backend(name, sequences.pool) for name in ("native_cpu", "torch_native")]
    ours, plain = (_step(sequences, computed, num_extends, backend, scale) for backend in backends)
    assert ours.shape == plain.shape == (sum(computed), 4 * kind.value_size)
    # Both round to the dtype, and so are up to two roundings apart.
    assert error(ours, plain.double()) < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_whole_model_has_the_same_bits_in_any_chunking_and_batch(dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_tiny(tiny_checkpoint(tmp_path / "model"), dtype, ops=native_ops())

    def harness() -> ForwardHarness:
        return ForwardHarness(model, backend="native_cpu")

    ids = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    whole = harness().step({2: ids})[2].log_probs
    chunked = harness()
    parts = [chunked.step({2: ids[start : start + 33]})[2].log_probs for start in range(0, 66, 33)]
    parts += [chunked.step(decodes={2: token})[2].log_probs for token in ids[66:80]]
    chunked.step({0: ids[:50], 1: ids[7:90]})
    parts += [chunked.step({3: ids[:1]}, {0: 5, 2: ids[80], 1: 6})[2].log_probs]
    parts += [chunked.step({0: ids[:9], 2: ids[81:], 1: ids[:2]})[2].log_probs]
    assert torch.equal(torch.cat(parts), whole)


def test_the_operator_is_chosen_where_it_applies() -> None:
    def chosen(dtype: torch.dtype, head_dim: int, kernels_available: bool = True) -> str:
        pool = KVPool(4, [FullKV(1, head_dim)], dtype)
        return type(create_attention_backend("auto", pool, kernels_available)).__name__

    assert all(chosen(dtype, 64) == "NativeCpuBackend" for dtype in DTYPES)
    for dtype, head_dim in ((torch.float64, 64), (torch.float32, 12), (torch.float32, 584)):
        assert chosen(dtype, head_dim) == "TorchNativeBackend"
    assert chosen(torch.float32, 64, kernels_available=False) == "TorchNativeBackend"
    on_meta = KVPool(4, [FullKV(1, 64)], torch.float32, "meta")
    assert NativeCpuBackend.obstacle(on_meta, kernels_available=True) is not None
    with pytest.raises(StartupError, match="float64 of head size 64"):
        create_attention_backend("native_cpu", KVPool(4, [FullKV(1, 64)], torch.float64))
