"""The ledger, and the one loading path into both sinks."""

from __future__ import annotations

import pytest
import torch

from tests.logical_weights_fake import (
    DOWN,
    EMBED,
    GATE_UP,
    LM_HEAD,
    NORM,
    FakeWeights,
    bits,
    expert_name,
    fused,
    version,
)
from weight_sync.errors import (
    ContentError,
    CoverageError,
    DtypeMismatchError,
    ShapeMismatchError,
    UnknownTensorError,
    WeightRequestError,
)
from weight_sync.intake import load_weights
from weight_sync.ledger import WeightLedger
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import DirectSink


def test_ledger_counts_each_tensor_once() -> None:
    ledger = WeightLedger(["a", "b", "c"])
    assert ledger.record("b", "b")
    assert ledger.missing == ["a", "c"]
    with pytest.raises(CoverageError, match="b came twice"):
        ledger.record("b", "b")
    with pytest.raises(CoverageError, match="z was not announced"):
        ledger.record("z", "z")
    with pytest.raises(CoverageError, match=r"2 of 3 tensors missing: a, c"):
        ledger.settle()
    ledger.record("c", "c")
    ledger.record("a", "a")
    ledger.settle()
    assert ledger.received == ["b", "c", "a"]


def test_ledger_takes_an_alias_once() -> None:
    ledger = WeightLedger(["embed"])
    assert ledger.record("embed", "embed") is True
    assert ledger.record("head", "embed") is False
    assert ledger.refusals([("head", "embed")]) == ["embed came twice as head"]
    assert ledger.received == ["embed"]


def test_ledger_sees_repeats_within_one_call() -> None:
    ledger = WeightLedger(["a", "b"])
    assert ledger.refusals([("a", "a"), ("b", "b")]) == []
    assert ledger.refusals([("a", "a"), ("a", "a")]) == ["a came twice"]


def test_partial_coverage_takes_what_came_also_nothing() -> None:
    ledger = WeightLedger(["a", "b"], "partial")
    ledger.settle()
    assert ledger.received == []
    ledger.record("a", "a")
    ledger.settle()
    assert ledger.received == ["a"]


@pytest.mark.parametrize("form", [dict, fused], ids=["per expert", "fused"])
def test_both_sinks_get_the_same_logical_tensors(form) -> None:  # type: ignore[no-untyped-def]
    sent = version(seed=5)
    direct, aside = FakeWeights(seed=0), FakeWeights(seed=0)
    before = aside.snapshot()
    staged = ShadowStaging(aside)
    for weights, sink in ((direct, DirectSink(direct)), (aside, staged)):
        ledger = WeightLedger(weights.metas())
        load_weights(weights, form(sent).items(), sink, ledger, cast=False)
        ledger.settle()
        assert sorted(ledger.received) == sorted(sent)
    for name, tensor in sent.items():
        assert bits(direct.read(name)) == bits(staged.read(name)[0].content) == bits(tensor)
    assert aside.snapshot() == before


def test_staged_content_is_a_copy() -> None:
    weights = FakeWeights()
    sink = ShadowStaging(weights)
    norm = torch.ones(4)
    load_weights(weights, [(NORM, norm)], sink, WeightLedger(weights.metas()), cast=False)
    norm.zero_()
    assert sink.read(NORM)[0].content.tolist() == [1.0] * 4


def test_cold_load_casts_and_refresh_does_not() -> None:
    weights = FakeWeights()
    embed = torch.randn(6, 4)
    load_weights(weights, [(EMBED, embed)], DirectSink(weights), WeightLedger(weights.metas()), cast=True)
    assert torch.equal(weights.embed, embed.to(torch.bfloat16))
    with pytest.raises(DtypeMismatchError, match=r"embed_tokens.*bfloat16, got float32"):
        load_weights(weights, [(EMBED, embed)], ShadowStaging(weights), WeightLedger(weights.metas()), cast=False)


def test_one_error_names_everything_and_nothing_is_written() -> None:
    weights = FakeWeights()
    before = weights.snapshot()
    ledger = WeightLedger(weights.metas())
    good = (NORM, torch.ones(4))

    def load(*named: tuple[str, torch.Tensor]) -> None:
        load_weights(weights, [good, *named], DirectSink(weights), ledger, cast=False)

    with pytest.raises(UnknownTensorError, match=r"ghost.*spectre"):
        load(("ghost", torch.ones(1)), ("spectre", torch.ones(1)))
    with pytest.raises(ShapeMismatchError, match="gate_up"):
        load((GATE_UP, torch.ones(3, 4, 5).to(torch.bfloat16)))
    with pytest.raises(DtypeMismatchError, match="bfloat16, got float16"):
        load((DOWN, torch.ones(3, 4, 2).to(torch.float16)))
    with pytest.raises(WeightRequestError, match=r"ghost.*embed_tokens"):
        load(("ghost", torch.ones(1)), (EMBED, torch.ones(1)))
    with pytest.raises(CoverageError, match=r"norm\.weight came twice"):
        load(good)
    assert weights.snapshot() == before
    assert ledger.received == []


def test_a_fused_tensor_repeats_its_parts() -> None:
    weights = FakeWeights()
    sink = ShadowStaging(weights)
    ledger = WeightLedger(weights.metas())
    sent = version(seed=5)
    load_weights(weights, [(DOWN, fused(sent)[DOWN])], sink, ledger, cast=False)
    name = expert_name(1, "down_proj")
    load_weights(weights, [(name, sent[name])], sink, ledger, cast=False)
    with pytest.raises(ContentError, match="other content"):
        load_weights(weights, [(expert_name(2, "down_proj"), sent[name])], sink, ledger, cast=False)


@pytest.mark.parametrize("names", [(EMBED, LM_HEAD), (LM_HEAD, EMBED)])
@pytest.mark.parametrize("cast", [True, False])
def test_tied_tensors_must_be_equal(names: tuple[str, str], cast: bool) -> None:
    embed = torch.randn(6, 4).to(torch.float32 if cast else torch.bfloat16)
    changed = embed.clone()
    changed[0, 0] += 1
    for second, error in ((embed, None), (changed, ContentError)):
        weights = FakeWeights()
        sink = DirectSink(weights) if cast else ShadowStaging(weights)
        ledger = WeightLedger(weights.metas())
        named = list(zip(names, (embed, second), strict=True))
        if error is None:
            load_weights(weights, named, sink, ledger, cast)
            assert ledger.received == [EMBED]
        else:
            with pytest.raises(error, match="other content"):
                load_weights(weights, named, sink, ledger, cast)
