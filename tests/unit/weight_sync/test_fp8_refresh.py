"""Quantised weights in a weight update: parts in any order and in any buckets, and bf16 that the engine quantises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.model.load import quantised_names
from tests import kernels
from tests.fp8_checkpoints import DTYPE, FAMILIES, QuantisedCase, fused, more_layers
from tests.fp8_reference import Named, fp8_checkpoint, is_quantised, quantised, values_of
from tests.loopback_updater import LoopbackSource, LoopbackUpdater
from tests.model_zoo import load_tiny
from tests.pair_forms import FORMS, INT4_FORM
from weight_sync.checker import live_fingerprints
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.errors import (
    ContentError,
    CoverageError,
    DtypeMismatchError,
    ShapeMismatchError,
    TransactionStateError,
    UnknownTensorError,
    WeightRequestError,
)
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.held_format import FP8_BLOCKS
from weight_sync.manifest import Entries
from weight_sync.receivers.delta import DeltaSource
from weight_sync.receivers.disk import DiskSource
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import LogicalWeights, TensorMeta, parts_of

WEIGHT = "model.layers.1.mlp.experts.2.down_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"
UP = INT4_FORM.weight
PACKED = f"{UP}_packed"
MODES: tuple[StagingMode, ...] = ("host", "device", "journal", "in_place")


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    """Load the compiled operators: what lies in one bucket goes by tables."""
    kernels.native_ops()


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QuantisedCase:
    return QuantisedCase(tmp_path_factory.mktemp("fp8"), request.param)


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: form.name)
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QuantisedCase:
    """Return weights in one of the forms in which a trainer sends parts."""
    return QuantisedCase(tmp_path_factory.mktemp("pairs"), "qwen3_moe", form=request.param)


@pytest.fixture(scope="module")
def sent_pairs(pairs: QuantisedCase) -> Named:
    return pairs.newer(1)[1]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> QuantisedCase:
    return QuantisedCase(tmp_path_factory.mktemp("fp8"), "qwen3_moe")


@pytest.fixture(scope="module")
def newer(moe: QuantisedCase) -> tuple[Named, Named, Named]:
    return moe.newer(1)


def updater_of(case: QuantisedCase, *, quantises: bool = False, mode: StagingMode = "host") -> LoopbackUpdater:
    weights = load_tiny(case.stored, DTYPE).weights
    held = dict.fromkeys(quantised_names(case.stored, weights) if quantises else (), FP8_BLOCKS)
    return LoopbackUpdater(weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine, staging=mode, quantised=held)


@pytest.fixture
def updater(moe: QuantisedCase) -> LoopbackUpdater:
    return updater_of(moe)


def held(weights: LogicalWeights) -> Named:
    return {name: parts_of(weights, name)[0].content for name in weights.metas()}


def holds(updater: LoopbackUpdater, values: Named) -> bool:
    found = held(updater.weights)
    assert found.keys() == values.keys()
    return all(torch.equal(found[name], values[name]) for name in values)


def digest_of(tensors: Named) -> str:
    return digest((TensorMeta(n, t.dtype, tuple(t.shape)), fingerprint(t)) for n, t in tensors.items())


def manifest_of(tensors: Named) -> Entries:
    return [(TensorMeta(n, t.dtype, tuple(t.shape)), fingerprint(t)) for n, t in tensors.items()]


def send(updater: LoopbackUpdater, buckets: Sequence[Named], manifest: Entries | None = None) -> None:
    updater.begin("v2", manifest=manifest)
    for bucket in buckets:
        updater.send(list(bucket.items()))
    updater.verify()
    updater.commit()


# --- a trainer that sends FP8 ------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_parts_may_come_in_any_order_and_in_any_buckets(
    pairs: QuantisedCase, sent_pairs: Named, data: st.DataObject
) -> None:
    updater, stored, values = updater_of(pairs), sent_pairs, pairs.form.values_of(sent_pairs, DTYPE)
    names = data.draw(st.permutations(sorted(stored)))
    ends = sorted(data.draw(st.lists(st.integers(0, len(names)), max_size=6)))
    buckets = [
        {name: stored[name].clone() for name in names[start:end]}
        for start, end in zip([0, *ends], [*ends, len(names)], strict=True)
    ]
    updater.begin("v2", manifest=manifest_of(stored) if data.draw(st.booleans()) else None)
    for bucket in buckets:
        updater.send(list(bucket.items()))
        for tensor in bucket.values():  # a transport's memory is used again
            tensor.view(-1).view(torch.uint8).fill_(0x7F)
    assert updater.status()["unpaired"] == 0
    updater.verify()
    result = updater.commit()
    assert holds(updater, values)
    assert result.digests.sent == digest_of(stored)
    assert result.digests.held == digest_of(values) != result.digests.sent
    assert result.num_bytes == sum(tensor.nbytes for tensor in values.values())


@pytest.mark.parametrize("mode", MODES)
def test_every_staging_mode_takes_parts(pairs: QuantisedCase, mode: StagingMode) -> None:
    updater, (_, stored, values) = updater_of(pairs, mode=mode), pairs.newer(2)
    names = sorted(stored, reverse=True)
    send(updater, [{name: stored[name] for name in names[part::3]} for part in range(3)], manifest_of(stored))
    assert holds(updater, values)
    assert updater.model.content.digests == (digest_of(stored), digest_of(values))


@pytest.mark.parametrize("mode", MODES)
def test_every_staging_mode_and_family(case: QuantisedCase, mode: StagingMode) -> None:
    updater, (_, fp8, values) = updater_of(case, mode=mode), case.newer(2)
    names = sorted(fp8, reverse=True)
    send(updater, [{name: fp8[name] for name in names[part::3]} for part in range(3)], manifest_of(fp8))
    assert holds(updater, values)
    assert updater.model.content.digests.held == digest_of(held(updater.weights))


def test_layers_that_are_left_out_may_come(case: QuantisedCase, tmp_path: Path) -> None:
    updater, (_, fp8, values) = updater_of(case), case.newer(5)
    more = more_layers(case.family)
    send(updater, [more, fp8], manifest_of(fp8 | more))
    assert holds(updater, values)
    assert updater.model.content.digests.sent == digest_of(fp8)
    folder = fp8_checkpoint(tmp_path / "more", case.plain, lambda tensors: tensors | more)
    updater.begin("v3")
    updater.receive(
        DiskSource(folder, updater.weights, complete=True, timeout_s=1.0, known_calls=updater.model.known_calls)
    )
    updater.verify()
    updater.commit()
    assert holds(updater, case.values)


def test_fused_experts_are_quantised_as_they_were_fused(updater: LoopbackUpdater, moe: QuantisedCase) -> None:
    sent, _, _ = moe.newer(3)
    fp8 = quantised(fused(sent))
    values = values_of(fp8, DTYPE)
    is_scale = {name: name.endswith("_scale_inv") for name in fp8}
    send(updater, [{name: fp8[name] for name in fp8 if is_scale[name] == scales} for scales in (True, False)])
    found = held(updater.weights)
    for name, whole in values.items():
        if name.endswith("gate_up_proj"):
            layer = name.removesuffix("gate_up_proj")
            for expert, (gate, up) in enumerate(zip(whole[:, :136], whole[:, 136:], strict=True)):
                assert torch.equal(found[f"{layer}{expert}.gate_proj.weight"], gate)
                assert torch.equal(found[f"{layer}{expert}.up_proj.weight"], up)
        elif not name.endswith("down_proj"):
            assert torch.equal(found[name], whole)
    assert updater.model.content.digests.sent not in (None, updater.model.content.digests.held)


def test_what_waits_is_counted_and_given_back(pairs: QuantisedCase, sent_pairs: Named) -> None:
    updater, stored = updater_of(pairs), sent_pairs
    firsts = pairs.form.firsts(stored)
    updater.begin("v2")
    assert (updater.status()["unpaired"], updater.status()["unpaired_bytes"]) == (0, 0)
    updater.send(list(firsts.items()))
    status = updater.status()
    assert status["received"] == 0
    assert status["unpaired"] == len(firsts)
    assert status["unpaired_bytes"] == sum(tensor.nbytes for tensor in firsts.values())
    updater.send([(name, tensor) for name, tensor in stored.items() if name not in firsts])
    assert (updater.status()["unpaired"], updater.status()["unpaired_bytes"]) == (0, 0)
    updater.verify()
    updater.commit()
    assert holds(updater, pairs.form.values_of(stored, DTYPE))


def test_no_more_waits_than_the_model_has(updater: LoopbackUpdater) -> None:
    """The scales of a fused tensor could have any size until the tensor comes."""
    limit = sum(meta.nbytes for meta in updater.weights.metas().values())
    updater.begin("v2")
    with pytest.raises(WeightRequestError, match="Send scales with their weights"):
        updater.send([("model.layers.1.mlp.experts.gate_up_proj_scale_inv", torch.ones(1, 1, limit // 4 + 1))])
    assert updater.status()["unpaired_bytes"] == 0


@pytest.mark.parametrize("left_out", [0, 1, -1])
def test_a_part_that_never_comes_is_refused_by_name(pairs: QuantisedCase, sent_pairs: Named, left_out: int) -> None:
    updater, form = updater_of(pairs), pairs.form
    rest = {name: x for name, x in sent_pairs.items() if name != form.parts[left_out]}
    updater.begin("v2")
    updater.send(list(rest.items()))
    assert updater.status()["missing"] > 0
    message = form.missing(form.weight, form.suffixes[left_out])
    with pytest.raises(CoverageError, match=message):
        updater.verify()
    assert holds(updater, pairs.values), "the old weights serve"
    with pytest.raises(CoverageError, match=message):
        updater.begin("v3", manifest=manifest_of(rest))


@pytest.mark.parametrize("again", [0, 1, -1])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_part_that_comes_twice_is_refused(
    pairs: QuantisedCase, sent_pairs: Named, again: int, is_whole: bool
) -> None:
    updater, name = updater_of(pairs), pairs.form.parts[again]
    updater.begin("v2")
    updater.send([(each, sent_pairs[each]) for each in (pairs.form.parts if is_whole else (name,))])
    with pytest.raises(CoverageError, match=f"{name} came twice"):
        updater.send([(name, sent_pairs[name])])
    assert updater.status()["unpaired"] == 0, "given back"


def test_parts_of_two_forms_are_refused(moe: QuantisedCase, newer: tuple[Named, Named, Named]) -> None:
    updater, form = updater_of(moe), INT4_FORM
    stored = newer[1] | form.quantised(newer[0])
    updater.begin("v2")
    message = f"{form.scale} is part of a weight in INT4, but {form.weight} came, which is in FP8"
    with pytest.raises(CoverageError, match=message):
        updater.send([(form.weight, stored[form.weight]), (form.scale, stored[form.scale])])


WRONG = {
    "scale of nothing": (
        "model.nothing.weight_scale_inv",
        torch.ones(1, 1),
        UnknownTensorError,
        "has no matching weight",
    ),
    "scale's dtype": (
        SCALE,
        torch.ones(2, 2).double(),
        DtypeMismatchError,
        f"{SCALE}: scales must be one of float32, ",
    ),
    "scale's shape": (SCALE, torch.ones(2, 3), ShapeMismatchError, "expected"),
    "per tensor": (SCALE, torch.tensor(1.0), ShapeMismatchError, "expected"),
    "weight's shape": (WEIGHT, torch.ones(136, 160).to(torch.float8_e4m3fn), ShapeMismatchError, "expects"),
    "vector": (
        "model.norm.weight",
        torch.ones(160).to(torch.float8_e4m3fn),
        ShapeMismatchError,
        "model.norm.weight is float8_e4m3fn but not a matrix",
    ),
    "e5m2": (WEIGHT, torch.ones(160, 136).to(torch.float8_e5m2), DtypeMismatchError, "got float8_e5m2"),
    "words of nothing": (
        "model.nothing.weight_packed",
        torch.ones(1, 4, dtype=torch.int32),
        UnknownTensorError,
        "has no matching weight: the model has no tensor 'model.nothing.weight'",
    ),
    "words' dtype": (
        PACKED,
        torch.ones(136, 20),
        DtypeMismatchError,
        f"'{PACKED}' is a part of INT4 and must be int32",
    ),
    "words' shape": (PACKED, torch.ones(136, 17, dtype=torch.int32), ShapeMismatchError, "expects"),
    "words' rank": (PACKED, torch.ones(136, dtype=torch.int32), ShapeMismatchError, "expected a matrix's"),
    "groups' dtype": (f"{UP}_scale", torch.ones(136, 5), DtypeMismatchError, "must be bfloat16, got float32"),
    "shape's shape": (f"{UP}_shape", torch.tensor([1, 2, 3]), ShapeMismatchError, r"expected \[2\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_halves_are_refused_before_they_come(updater: LoopbackUpdater, name: str) -> None:
    wrong, tensor, kind, message = WRONG[name]
    updater.begin("v2")
    source = LoopbackSource([(wrong, tensor)], AssertionError("it is not received"))
    source.must_drain = False
    with pytest.raises(kind, match=message):
        updater.receive(source)


def test_wrong_content_is_refused(updater: LoopbackUpdater, newer: tuple[Named, Named, Named]) -> None:
    _, fp8, _ = newer
    nan = torch.full((160, 136), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for weight, scale, message in (
        (nan, fp8[SCALE], f"not finite in {WEIGHT}"),
        (fp8[WEIGHT], -fp8[SCALE], f"{SCALE}: a scale is negative"),
        (fp8[WEIGHT], fp8[SCALE] * float("inf"), f"{SCALE}: a scale is negative or not finite"),
        (torch.full((160, 136), 448.0).to(torch.float8_e4m3fn), torch.full((2, 2), 3e38), f"not finite in {WEIGHT}"),
    ):
        updater.begin("v2")
        with pytest.raises(ContentError, match=message):
            updater.send([(SCALE, scale), (WEIGHT, weight)])
        updater.drop("wrong")


WRONG_INT4 = {
    "zero": (1, lambda x: x.index_fill(0, torch.tensor([5]), 0), f"{UP}_scale: a scale is zero, negative or not"),
    "negative": (1, lambda x: -x, "a scale is zero, negative or not finite"),
    "not finite": (1, lambda x: x.index_fill(1, torch.tensor([2]), float("nan")), "a scale is zero, negative or not"),
    "too large": (1, lambda x: torch.full_like(x, 3e38), f"values that are not finite in {UP}"),
    "groups of 64": (1, lambda x: x[:, :2], f"{UP} is not in INT4"),
    "rows of scales": (1, lambda x: x[1:], f"{UP} is not in INT4"),
    "another shape": (-1, lambda x: x.flip(0), rf"{UP}_shape is \[160, 136\], but {PACKED} has \[136, 160\]"),
}


@pytest.mark.parametrize("name", WRONG_INT4)
def test_parts_of_int4_that_are_wrong_are_refused(
    moe: QuantisedCase, newer: tuple[Named, Named, Named], name: str
) -> None:
    """The same is refused where the first bytes come, at the end, and from a folder."""
    place, change, message = WRONG_INT4[name]
    updater, form = updater_of(moe), INT4_FORM
    stored = {each: x for each, x in form.quantised(newer[0]).items() if each in form.parts}
    stored[form.parts[place]] = change(stored[form.parts[place]])
    for order in (1, -1):
        updater.begin("v2", coverage="partial")
        with pytest.raises((ContentError, ShapeMismatchError), match=message):
            updater.send(list(stored.items())[::order])
        updater.drop("wrong")
    assert holds(updater, moe.values), "nothing was changed"


def test_a_plain_tensor_with_scales_is_refused(pairs: QuantisedCase, sent_pairs: Named) -> None:
    updater, form, plain = updater_of(pairs), pairs.form, pairs.newer(1)[0]
    weight, scale = form.weight, form.scale
    updater.begin("v2")
    message = f"{weight} is bfloat16, which has no scales, but came with {scale}"
    with pytest.raises(DtypeMismatchError, match=message):
        updater.send([(scale, sent_pairs[scale]), (weight, plain[weight])])
    updater.drop("wrong")
    updater.begin("v2", coverage="partial")
    updater.send([(weight, plain[weight]), (scale, sent_pairs[scale])])
    with pytest.raises(CoverageError, match=form.missing(weight, form.suffixes[0])):
        updater.verify()
    updater.begin("v2", coverage="partial")
    with pytest.raises(CoverageError, match=f"{weight} came twice"):
        updater.send([(weight, plain[weight])])
        updater.send([(name, sent_pairs[name]) for name in form.parts])


@pytest.mark.parametrize("part", [0, 1])
def test_each_part_is_checked_against_the_manifest(pairs: QuantisedCase, sent_pairs: Named, part: int) -> None:
    updater, name = updater_of(pairs), pairs.form.parts[part]
    other = {**sent_pairs, name: sent_pairs[name].clone()}
    other[name].view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(ContentError, match=f"{name}: fingerprint"):
        send(updater, [other], manifest_of(sent_pairs))
    assert holds(updater, pairs.values)


@pytest.mark.parametrize("sends_parts", [True, False])
def test_another_form_than_the_manifest_states_is_refused(
    pairs: QuantisedCase, sent_pairs: Named, sends_parts: bool
) -> None:
    """Parts under other names have fingerprints of their own: that of the whole weight would not be compared."""
    updater, plain = updater_of(pairs), pairs.newer(1)[0]
    stated, sent = (plain, sent_pairs) if sends_parts else (sent_pairs, plain)
    weight, first = pairs.form.weight, pairs.form.parts[0]
    came, announced = (first, weight) if sends_parts else (weight, first)
    message = f"{weight} came as {came}, but the manifest states the fingerprint of {announced}"
    with pytest.raises(ContentError, match=message if pairs.form is INT4_FORM else f"{weight}: fingerprint"):
        updater.begin("v2", manifest=manifest_of(stated))
        updater.send([(name, sent[name]) for name in (pairs.form.parts if sends_parts else [weight])])
    assert holds(updater, pairs.values)
    updater.drop("wrong")
    without = [(meta, None) for meta, _ in manifest_of(stated)]
    send(updater, [sent], without)
    assert holds(updater, pairs.form.values_of(sent, DTYPE)), "nothing was stated"


def test_refresh_from_a_folder_of_any_form(pairs: QuantisedCase, sent_pairs: Named, tmp_path: Path) -> None:
    """A start from the folder holds the same."""
    stored, form = sent_pairs, pairs.form
    folder = pairs.written(tmp_path / "newer", stored)
    updater = updater_of(pairs)
    take_folder(updater, folder)
    assert holds(updater, form.values_of(stored, DTYPE))
    assert updater.model.content.digests.sent == digest_of(stored)
    assert live_fingerprints(load_tiny(folder, DTYPE).weights) == live_fingerprints(updater.weights)
    for name in form.parts:  # a delta between versions may change any part
        updater = updater_of(pairs)
        take_folder(updater, folder, [name])
        changed = pairs.values | {form.weight: form.values_of(stored, DTYPE)[form.weight]}
        assert holds(updater, changed)
    left = pairs.written(tmp_path / "left", {name: x for name, x in stored.items() if name != form.scale})
    with pytest.raises(CoverageError, match=form.missing(form.weight, form.suffixes[1])):
        take_folder(updater, left)


def take_folder(updater: LoopbackUpdater, folder: Path, names: Sequence[str] | None = None) -> None:
    updater.begin("v2", "full" if names is None else "partial")
    updater.receive(
        DiskSource(
            folder,
            updater.weights,
            complete=names is None,
            timeout_s=1.0,
            known_calls=updater.model.known_calls,
            names=names,
        )
    )
    updater.verify()
    updater.commit()


def test_refresh_from_a_folder(moe: QuantisedCase, newer: tuple[Named, Named, Named], tmp_path: Path) -> None:
    """An engine with FP8 or plain weights takes a folder of either kind."""
    sent, fp8, values = newer
    folder = fp8_checkpoint(tmp_path / "fp8", moe.plain, lambda _: fp8)
    plain = fp8_checkpoint(tmp_path / "plain", moe.plain, lambda _: sent)
    for path, expected, on_the_wire in ((folder, values, fp8), (plain, sent, sent)):
        updater = updater_of(moe)
        updater.begin("v2")
        updater.receive(
            DiskSource(path, updater.weights, complete=True, timeout_s=1.0, known_calls=updater.model.known_calls)
        )
        updater.verify()
        result = updater.commit()
        assert holds(updater, expected)
        assert result.digests.sent == digest_of(on_the_wire)
    updater = updater_of(moe)
    for name in (WEIGHT, SCALE):  # a delta between versions may change either half
        updater.begin("v3", "partial")
        updater.receive(
            DiskSource(
                folder,
                updater.weights,
                complete=False,
                timeout_s=1.0,
                known_calls=updater.model.known_calls,
                names=[name],
            )
        )
        updater.verify()
        assert updater.commit().names == [WEIGHT]
        assert torch.equal(held(updater.weights)[WEIGHT], values[WEIGHT])
    half = fp8_checkpoint(tmp_path / "half", moe.plain, lambda _: {n: t for n, t in fp8.items() if n != SCALE})
    updater.begin("v4")
    with pytest.raises(CoverageError, match=f"{WEIGHT} is float8_e4m3fn and has no {SCALE}"):
        updater.receive(
            DiskSource(half, updater.weights, complete=True, timeout_s=1.0, known_calls=updater.model.known_calls)
        )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["buckets", "folder"])
def test_scales_of_16_bits_refresh(
    moe: QuantisedCase, newer: tuple[Named, Named, Named], kind: torch.dtype, way: str, tmp_path: Path
) -> None:
    """B10: values are as with float32 scales; fingerprints, digest and manifest are of the tensors as sent."""
    fp8 = {name: tensor.to(kind) if name.endswith("_scale_inv") else tensor for name, tensor in newer[1].items()}
    wide = {name: tensor.float() if name.endswith("_scale_inv") else tensor for name, tensor in fp8.items()}
    updater = updater_of(moe)
    updater.begin("v2", manifest=manifest_of(fp8))
    if way == "folder":
        folder = fp8_checkpoint(tmp_path / "fp8", moe.plain, lambda _: fp8)
        updater.receive(
            DiskSource(folder, updater.weights, complete=True, timeout_s=1.0, known_calls=updater.model.known_calls)
        )
    else:
        names = sorted(fp8)
        for part in range(3):
            updater.send([(name, fp8[name]) for name in names[part::3]])
    updater.verify()
    result = updater.commit()
    assert holds(updater, values_of(wide, DTYPE))
    assert result.digests.sent == digest_of(fp8) != digest_of(wide)
    updater.begin("v3", manifest=manifest_of(wide))
    with pytest.raises(ContentError, match="fingerprint"):
        updater.send(list(fp8.items()))


# --- a trainer that sends bf16 -----------------------------------------------------------------------------------


def test_without_the_option_bf16_is_held_as_it_was_sent(
    updater: LoopbackUpdater, newer: tuple[Named, Named, Named]
) -> None:
    sent, _, values = newer
    send(updater, [sent], manifest_of(sent))
    assert holds(updater, sent)
    assert not holds(updater, values)
    assert updater.model.content.digests == (digest_of(sent), digest_of(sent))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["per expert", "fused"])
def test_with_the_option_an_fp8_checkpoint_of_it_is_held(
    case: QuantisedCase, mode: StagingMode, form: str, tmp_path: Path
) -> None:
    updater, (sent, fp8, values) = updater_of(case, quantises=True, mode=mode), case.newer(4)
    on_the_wire = fused(sent) if form == "fused" else sent
    names = sorted(on_the_wire)
    buckets = [{name: on_the_wire[name] for name in names[part::2]} for part in range(2)]
    send(updater, buckets, manifest_of(sent) if form == "per expert" else None)
    assert holds(updater, values)
    assert updater.model.content.digests == (digest_of(sent), digest_of(values))
    if mode == "host" and form == "per expert":  # an engine that starts from the folder has the same
        folder = fp8_checkpoint(tmp_path / "fp8", case.plain, lambda _: fp8)
        started = load_tiny(folder, DTYPE).weights
        assert live_fingerprints(started) == live_fingerprints(updater.weights)


def test_only_what_the_checkpoint_quantises_is_quantised(moe: QuantisedCase, newer: tuple[Named, Named, Named]) -> None:
    sent, _, values = newer
    updater = updater_of(moe, quantises=True)
    assert updater.model.quantised.keys() == {name for name, tensor in sent.items() if is_quantised(name, tensor)}
    send(updater, [sent])
    found = held(updater.weights)
    assert all(torch.equal(found[name], sent[name]) for name in sent.keys() - updater.model.quantised.keys())
    assert all(not torch.equal(values[name], sent[name]) for name in updater.model.quantised)


def test_with_the_option_fp8_is_held_as_it_came(moe: QuantisedCase, newer: tuple[Named, Named, Named]) -> None:
    _, fp8, values = newer
    updater = updater_of(moe, quantises=True)
    send(updater, [fp8], manifest_of(fp8))
    assert holds(updater, values)
    assert updater.model.content.digests == (digest_of(fp8), digest_of(values))


def test_with_the_option_wrong_content_is_refused_as_sent(
    moe: QuantisedCase, newer: tuple[Named, Named, Named]
) -> None:
    sent, _, _ = newer
    updater = updater_of(moe, quantises=True)
    bad = {**sent, WEIGHT: sent[WEIGHT].clone()}
    bad[WEIGHT][3, 4] = float("nan")
    with pytest.raises(ContentError, match=f"not finite in {WEIGHT}"):
        send(updater, [bad])
    updater.drop("wrong")
    bad[WEIGHT][3, 4] = sent[WEIGHT][3, 4] * 2
    with pytest.raises(ContentError, match=f"{WEIGHT}: fingerprint"):
        send(updater, [bad], manifest_of(sent))


def test_a_partial_refresh_keeps_both_digests(moe: QuantisedCase, newer: tuple[Named, Named, Named]) -> None:
    sent, _, values = newer
    updater = updater_of(moe, quantises=True)
    send(updater, [sent])
    changed = {WEIGHT: sent[WEIGHT] * 2}
    updater.begin("v3", "partial", manifest_of(changed))
    updater.send(list(changed.items()))
    updater.verify()
    result = updater.commit()
    now = values | values_of(quantised(changed), DTYPE)
    assert holds(updater, now)
    assert result.digests == (digest_of(sent | changed), digest_of(now))
    updater.model.content.note_live(live_fingerprints(updater.weights))
    assert updater.model.content.digests == result.digests, "reading memory forgets nothing of what was sent"


# --- deltas over a broadcast -------------------------------------------------------------------------------------


def frame(old: Named, new: Named) -> LoopbackSource:
    """Return the broadcast of a trainer that holds `new` and sent `old` before."""
    (payload,) = DeltaEncoder(old.items()).encode(new.items()).payloads()
    return LoopbackSource([("delta", torch.frombuffer(bytearray(payload), dtype=torch.uint8))])


def test_deltas_are_over_what_is_held(moe: QuantisedCase, newer: tuple[Named, Named, Named]) -> None:
    """After FP8 came, deltas are over its values.  An engine that quantises takes none: it does not hold the base."""
    sent, fp8, values = newer
    changed = {WEIGHT: values[WEIGHT] * 2}
    updater = updater_of(moe)
    send(updater, [fp8])
    updater.begin("v3", "partial")
    updater.receive(DeltaSource(frame(values, values | changed), updater.weights))
    updater.verify()
    updater.commit()
    assert holds(updater, values | changed)
    updater = updater_of(moe, quantises=True)
    send(updater, [sent])
    updater.begin("v3", "partial")
    delta = frame(sent, sent | changed)
    with pytest.raises(TransactionStateError, match=r"_proj\.weight: a delta changes the sent values"):
        updater.receive(DeltaSource(delta, updater.weights, quantised=updater.model.quantised))
    updater.drop("refused")
    updater.begin("v3", "partial")
    with pytest.raises(TransactionStateError, match="the engine holds values of FP8 tensors"):
        updater.receive(DeltaSource(frame(fp8, fp8), updater.weights))
    assert holds(updater, values)
