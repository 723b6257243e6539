"""The kernels of `--enable-deterministic-inference`, interpreted: against float64, and the same bits in every batch.

bfloat16 is left out: triton's interpreter computes it wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rollout.attention.base import AttentionBackend
from rollout.core.sampling_params import SamplingParams
from rollout.core.specs.layer_specs import FullKV, LatentKV, WindowKV
from rollout.kernels.ops import plain_ops
from rollout.memory.kv_pool import KVScale
from rollout.sampling.base import SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.sampling.torch_sampler import TorchSampler
from tests.attention_steps import AttentionSteps, LayerCase, Layout
from tests.fixed_numerics import OnInterpreter, fixed_numerics
from tests.interpreted import kernels
from tests.kernels import error

attention, product = kernels("fixed_attention"), kernels("fixed_product")
InvariantGpuSampler = pytest.importorskip("rollout.sampling.invariant_sampler").InvariantGpuSampler
plain = plain_ops()
LAYERS = {
    "grouped heads": LayerCase(FullKV(2, 24), 6, scale=0.2),
    "window and sinks": LayerCase(WindowKV(1, 16, 37), 3, has_sinks=True),
    "latents": LayerCase(LatentKV(136, 8), 20, scale=0.1),
}
LENGTH = 70  # three splits
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.full)], ids=str)


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with fixed_numerics() as patch:
        patch.setattr(attention, "SPLIT", 64)
        yield patch


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- products ---------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_agree_with_float64(has_bias: bool, dtype: torch.dtype) -> None:
    hidden, weight = _randn(21, 70, dtype=dtype), _randn(67, 70, seed=1, dtype=dtype)
    bias = _randn(67, seed=2, dtype=dtype) if has_bias else None
    want = plain.linear(hidden.double(), weight.double(), 67, None if bias is None else bias.double())
    got = product.linear(hidden, weight, 67, bias)
    assert got.dtype == dtype and error(got, want) < (1e-6 if dtype == torch.float32 else 1e-3)


def test_a_norm_and_its_product_are_the_two_operators() -> None:
    residual, hidden, weight = _randn(3, 40), _randn(3, 40, seed=1), _randn(9, 40, seed=2)
    norm, sums = _randn(40, seed=3), residual.clone()
    got = product.norm_linear(sums, hidden, norm, 1e-6, weight, 9)
    assert error(got, plain.norm_linear(residual, hidden, norm, 1e-6, weight, 9)) < 1e-6
    assert torch.equal(sums, residual)


def rows_are_the_same() -> bool:
    hidden, weight = _randn(40, 70), _randn(67, 70, seed=1)
    whole = product.linear(hidden, weight, 67)
    parts = (hidden[:1], hidden[:17], hidden[5:6])
    return all(
        torch.equal(product.linear(part, weight, 67), whole[first : first + len(part)])
        for part, first in zip(parts, (0, 0, 5))
    )


def test_rows_of_products_do_not_depend_on_the_batch(patch: pytest.MonkeyPatch) -> None:
    assert rows_are_the_same()
    tile, count = product.choose_tile(67, torch.float32), iter((32, 16, 16, 16))
    patch.setattr(product, "choose_tile", lambda *_: tile._replace(depth=next(count)))
    assert not rows_are_the_same(), "a depth that the batch chooses"


# --- attention --------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("layer", LAYERS)
def test_attention_agrees_with_float64(layer: str, dtype: torch.dtype) -> None:
    steps = AttentionSteps([LAYERS[layer]], dtype)
    backend, layout = OnInterpreter(steps.pool), Layout([(0, 0, 9), (3, 50, 30)], [(1, 1), (5, 90), (4, 64)])
    backend.plan(steps.batch(layout))
    steps.compare(steps.attend(backend, 0, layout), 0, layout)


def last_token(steps: AttentionSteps, backend: AttentionBackend, layout: Layout, row: int) -> torch.Tensor:
    backend.plan(steps.batch(layout))
    return steps.attend(backend, 0, layout)[row]


def ways(steps: AttentionSteps) -> list[torch.Tensor]:
    """Compute the last of `LENGTH` tokens as a prompt's, behind a prefix, and decoding alone and among others."""
    backend = OnInterpreter(steps.pool)
    found = [last_token(steps, backend, Layout([(2, LENGTH - 3, 3)]), 2)]
    found.append(last_token(steps, backend, Layout([(1, 0, 4), (2, 33, LENGTH - 33)]), 4 + LENGTH - 34))
    found.append(last_token(steps, backend, Layout(decodes=[(2, LENGTH)]), 0))
    others = Layout(decodes=[(0, 90), (2, LENGTH), (3, 1)])
    found.append(last_token(steps, backend, others, 1))
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(attention, "ENOUGH_PROGRAMS", 0)  # one program takes all splits
        found.append(last_token(steps, backend, others, 1))
    found.append(last_token(steps, backend.for_graph(3), others, 1))
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_bits_do_not_depend_on_the_step(layer: str) -> None:
    first, *others = ways(AttentionSteps([LAYERS[layer]], torch.float32))
    assert all(torch.equal(found, first) for found in others)


def test_keys_and_values_in_fp8_at_scales() -> None:
    """Against float64, and the same bits in every step, whatever program multiplies by the scale."""
    case, scales = LAYERS["grouped heads"], [KVScale(0.31, 1.7)]
    steps = AttentionSteps([case], torch.float32, stored=torch.float8_e4m3fn, scales=scales)
    backend, layout = OnInterpreter(steps.pool), Layout([(3, 50, 30)], [(1, 1), (5, 90)])
    backend.plan(steps.batch(layout))
    steps.compare(steps.attend(backend, 0, layout), 0, layout)
    first, *others = ways(steps)
    assert all(torch.equal(found, first) for found in others)
    steps.pool.scales = (KVScale(0.31, 1.0),)
    backend.plan(steps.batch(layout))
    with pytest.raises(AssertionError, match="layer 0"):
        steps.compare(steps.attend(backend, 0, layout), 0, layout)


def test_a_split_that_the_batch_chooses_is_noticed(patch: pytest.MonkeyPatch) -> None:
    right = attention.attend

    def of_batch(q_THD: torch.Tensor, *given: object) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(attention, "SPLIT", 32 if len(q_THD) == 1 else 64)
            right(q_THD, *given)

    patch.setattr(attention, "attend", of_batch)
    first, *others = ways(AttentionSteps([LAYERS["grouped heads"]], torch.float32))
    assert not all(torch.equal(found, first) for found in others)


# --- sampling ---------------------------------------------------------------------------------------------------------


def _row(**settings: object) -> SamplingRow:
    wishes = {name: settings.pop(name) for name in ("top_logprobs", "chosen_ids", "wants_mask") if name in settings}
    params = SamplingParams(**{"temperature": 0.7, **settings})  # type: ignore[arg-type]
    return SamplingRow(params, 2**63 + 5, (7,), [1, 4], [3, 3, 9], **wishes)  # type: ignore[arg-type]


ROWS = [
    _row(),
    _row(temperature=0.0, top_logprobs=4),
    _row(top_p=0.8, wants_mask=True),
    _row(frequency_penalty=0.5, repetition_penalty=1.2, chosen_ids=(3, 0)),
    _row(logit_bias={7: 3.0, 9: -1.0}, min_new_tokens=9, top_k=5, top_logprobs=1),
]


def _sampled(logits: torch.Tensor, rows: list[SamplingRow], sampler: TorchSampler | None = None) -> SampledTokens:
    positions = torch.full((len(rows),), 3)
    info = SamplingBatchInfo(rows, logits.shape[1])
    return (sampler or InvariantGpuSampler(16)).sample(logits.clone(), info, positions)


def _logits() -> torch.Tensor:
    logits = _randn(len(ROWS), 60, dtype=torch.bfloat16) * 2
    logits[1, [11, 50]] = logits[1].max() + 1  # equal ones
    return logits


def test_rows_are_sampled_as_plain_torch_samples_them() -> None:
    got, want = (_sampled(_logits(), ROWS, sampler) for sampler in (None, TorchSampler()))
    assert torch.equal(got.token_ids, want.token_ids) and torch.equal(got.kept_counts, want.kept_counts)
    for name in ("logprobs", "top_logprobs", "chosen_logprobs"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert got.top_ids[1, :2].tolist() == [11, 50], "of equal logits the lower id comes first"
    assert (got.top_ids[0] == -1).all() and got.top_ids[4, 1:].tolist() == [-1, -1, -1]


def test_a_sampled_row_does_not_depend_on_the_batch() -> None:
    logits, together = _logits(), _sampled(_logits(), ROWS)
    for i, row in enumerate(ROWS):
        alone = _sampled(logits[i : i + 1], [row])
        assert alone.token_ids[0] == together.token_ids[i] and torch.equal(alone.logprobs[0], together.logprobs[i])
        wanted = row.top_logprobs
        assert torch.equal(alone.top_ids[0, :wanted], together.top_ids[i, :wanted])
        assert torch.equal(alone.top_logprobs[0, :wanted], together.top_logprobs[i, :wanted])
    chosen = _sampled(logits[3:4], ROWS[3:4]).chosen_logprobs
    assert torch.equal(chosen, together.chosen_logprobs)


def test_a_score_has_the_bits_of_the_sample() -> None:
    logits, rows = _logits()[:3], [_row(), _row(top_p=0.8), _row(top_k=9)]
    tokens, sampler = _sampled(logits, rows), InvariantGpuSampler(16)
    for numbers in (logits, logits.float()):
        scored = sampler.score(numbers, tokens.token_ids, 0.7, [5, 2], 2)
        assert torch.equal(scored.logprobs, tokens.logprobs)
        assert scored.top_ids.shape == scored.chosen_logprobs.shape == (3, 2)
    logits[1, 8], logits[2] = torch.nan, -torch.inf
    scored = sampler.score(logits, tokens.token_ids, 0.7, [], 2)
    assert scored.logprobs.isnan().tolist() == [False, True, True]
    assert scored.top_ids[1:].tolist() == [[0, 1], [0, 1]] and scored.top_logprobs[1:].isnan().all()
