"""Experts in 8 and 4 bits: values held by their definition, products with the bits of bfloat16 with these values,
through cold load, refresh and moves of experts."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.messages.experts import EplbRebalanceReqInput
from rollout.core.messages.weights import UpdateWeightsFromDiskReqInput
from rollout.kernels.held_places import HELD_FORMS
from rollout.kernels.ops import Ops, PackedHeld, compiled_ops, select_ops
from tests import kernels
from tests.family_zoo import family_checkpoint
from tests.fp8_reference import fp8_checkpoint, quantise
from tests.fp8_reference import stored_tensors as fp8_tensors
from tests.held_reference import held_of
from tests.held_refresh import digest_of, newer, updater_of
from tests.loopback_updater import LoopbackSource, LoopbackUpdater
from tests.model_zoo import load_tiny, logical_tensors, stored_tensors, tiny_checkpoint
from tests.pair_forms import FORM_OF, int4_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness
from weight_sync.checker import compare, live_fingerprints, reset_tensors, resettable, take_snapshot
from weight_sync.content import TensorTable
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.errors import ContentError, TransactionStateError
from weight_sync.fingerprint import fingerprint
from weight_sync.held_memory import Areas
from weight_sync.int8_blocks import held_values
from weight_sync.ledger import Coverage
from weight_sync.plan import Planner
from weight_sync.receivers.delta import DeltaSource
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import BucketLayout, Pair, TensorMeta

Named = dict[str, torch.Tensor]
PROMPTS = [[7, 3, 9], list(range(20, 50)), [5], [4] * 17, [9, 9, 1]]
MODES: tuple[StagingMode, ...] = ("host", "device", "journal", "in_place")
FORMATS = ("w8", "fp8", "int4", "int4-128")


def settings_of(form: str) -> dict[str, Any]:
    return {"dtype": "bfloat16", "cpu_weight_format": form}


@pytest.fixture(scope="module", params=FORMATS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def native() -> Ops:
    return kernels.native_ops()


@pytest.fixture(scope="module")
def ops(native: Ops, form: str) -> Ops:
    return compiled_ops(PackedHeld(form))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("held") / "plain", "moe_dense_first", dtype="bfloat16")


def held(tensors: Named, form: str) -> Named:
    """Return the tensors as an engine with experts in this form holds them."""
    is_expert = {name: ".experts." in name and name.endswith("_proj.weight") for name in tensors}
    return {name: held_of(form, tensor) if is_expert[name] else tensor for name, tensor in tensors.items()}


def held_folder(folder: Path, target: Path, form: str) -> Path:
    """Write a checkpoint of the held values, for an engine in bfloat16."""
    shutil.copytree(folder, target)
    for file in target.glob("*.safetensors*"):
        file.unlink()
    save_file(
        {name: x.contiguous() for name, x in held(logical_tensors(folder), form).items()}, target / "model.safetensors"
    )
    return target


# --- by definition ----------------------------------------------------------------------------------------------------


def by_definition(block: list[float]) -> list[float]:
    """Return the held values of up to 32 numbers, in exact arithmetic."""
    largest = max(map(abs, block))
    if largest == 0:
        return [0.0] * len(block)
    exponent = max(math.floor(math.log2(largest)) - 7, -126)
    while exponent < 127 and Fraction(largest) >= 128 * Fraction(2) ** exponent:
        exponent += 1
    power = Fraction(2) ** exponent
    # `round` of a fraction is to the nearest even.
    return [float(max(-127, min(127, round(Fraction(x) / power))) * power) for x in block]


numbers = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(-(2.0**-119), 2.0**-119, width=32),
    st.sampled_from([0.0, -0.0, 127.5, -127.5, 255.0, 64.0, 0.5, 2.0**-133, 3.0e38]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=70))
def test_what_is_held_is_what_the_definition_says(row: list[float]) -> None:
    x_K = torch.tensor(row).bfloat16()
    expected = [value for at in range(0, len(row), 32) for value in by_definition(x_K[at : at + 32].tolist())]
    found_K = held_values(x_K[None])[0]
    assert found_K.tolist() == expected
    assert torch.equal(found_K.double(), torch.tensor(expected, dtype=torch.float64))  # exact in bfloat16
    assert torch.equal(held_values(found_K[None])[0], found_K)


def test_numbers_that_are_not_finite_are_refused(ops: Ops, form: str) -> None:
    weight = torch.ones(32, 64, dtype=torch.bfloat16)
    weight[3, 40] = float("inf")
    with pytest.raises(ContentError, match="not finite"):
        HELD_FORMS[form].held.values(weight)
    stored = ops.storage.empty_experts(1, 32, 64, torch.bfloat16, "cpu")
    with pytest.raises(ContentError, match="not finite"):
        ops.storage.expert_place(*stored, "up_proj", 0, 32, 64).write(weight)


# --- the operator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 5, 13, 60])
@pytest.mark.parametrize(("inner", "hidden"), [(32, 64), (40, 50), (7, 33), (96, 160), (272, 144)])
def test_products_have_the_bits_of_bfloat16_with_these_values(
    native: Ops, ops: Ops, form: str, inner: int, hidden: int, num_tokens: int
) -> None:
    torch.manual_seed(num_tokens)
    w13 = (torch.randn(5, 2 * inner, hidden) * torch.randn(5, 2 * inner, hidden).exp()).bfloat16()
    w13[1, 2:9] *= 1e-37  # the exponents' end
    w13[2, :, 3:40] = 0
    w13[3] = 0  # whole blocks
    w2 = torch.randn(5, hidden, inner).bfloat16()
    x = torch.randn(num_tokens, hidden).bfloat16()
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, 3).bfloat16()
    gate_up = torch.cat([held_of(form, half) for half in w13.split(inner, 1)], 1)
    down = held_of(form, w2)
    expected = kernels.experts(native, x, ids, weights, gate_up, down)
    stored = kernels.expert_weights(ops, w13, w2)
    assert torch.equal(ops.fused_experts(x, ids, weights, *stored), expected)
    assert not torch.equal(kernels.experts(native, x, ids, weights, w13, w2), expected)
    for part, content in (("gate_proj", gate_up[:, :inner]), ("up_proj", gate_up[:, inner:]), ("down_proj", down)):
        for expert in range(5):
            place = ops.storage.expert_place(*stored[:2], part, expert, inner, hidden)  # type: ignore[arg-type]
            assert torch.equal(place.read(), content[expert])
            other = place.rebind(torch.zeros_like(place.storage))
            other.restore(place.saved())
            assert torch.equal(other.read(), place.read())


def test_rows_of_experts_are_independent(ops: Ops) -> None:
    torch.manual_seed(0)
    stored = kernels.expert_weights(ops, torch.randn(8, 128, 96).bfloat16(), torch.randn(8, 96, 64).bfloat16())
    x, ids = torch.randn(50, 96).bfloat16(), torch.stack([torch.randperm(8)[:2] for _ in range(50)])
    weights = torch.rand(50, 2).bfloat16()
    assert kernels.rows_are_independent(lambda rows: ops.fused_experts(x[rows], ids[rows], weights[rows], *stored), 50)


# --- the engine -------------------------------------------------------------------------------------------------------


def samples(harness: Harness | ParallelHarness) -> list[tuple[list[int], list[float], bytes]]:
    found = harness.generate(PROMPTS, {"max_new_tokens": 12, "temperature": 1.0})
    return [(each.token_ids, each.logprobs, each.routes.tobytes()) for each in found]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_an_engine_samples_as_one_in_bfloat16_with_these_values(tmp_path: Path, family: str, form: str) -> None:
    path = family_checkpoint(tmp_path / "plain", family, 3, torch.bfloat16)
    same = samples(Harness(held_folder(path, tmp_path / "held", form), dtype="bfloat16"))
    harness = Harness(path, **settings_of(form))
    assert samples(harness) == same != samples(Harness(path, dtype="bfloat16"))
    found, model = logical_tensors(path), harness.scheduler.runner.state.model
    assert all(
        torch.equal(model.weights.places(name)[0].read().float(), x.float()) for name, x in held(found, form).items()
    )


def test_moved_experts_have_the_bits_of_bfloat16_that_was_moved(folder: Path, tmp_path: Path, form: str) -> None:
    layout = {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 2, "enable_eplb": True}
    found = []
    for path, format_of in (
        (held_folder(folder, tmp_path / "held", form), {"dtype": "bfloat16"}),
        (folder, settings_of(form)),
    ):
        with ParallelHarness(path, **layout, **format_of) as harness:
            first = samples(harness)
            placement = harness.schedulers[0].runner.state.placement.metadata
            other = placement.physical_to_logical_map.flip(1).tolist()
            answer = harness.control(EplbRebalanceReqInput, physical_to_logical_map=other)
            assert answer.success and answer.data["rebalanced"], answer
            found.append((first, samples(harness)))
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sent_as", ["bfloat16", "fp8", "int4"])
def test_a_refresh_keeps_the_fingerprints_of_what_was_sent_and_of_what_is_held(
    folder: Path, ops: Ops, form: str, mode: StagingMode, sent_as: str
) -> None:
    updater, tensors, parts = updater_of(folder, ops, mode), newer(folder), FORM_OF.get(sent_as)
    sent = tensors if parts is None else parts.quantised(tensors, lambda name, _: ".experts." in name)
    values = tensors if parts is None else parts.values_of(sent, torch.bfloat16)
    wanted = held(values, form)
    if parts is not None and sent_as == form:  # what has parts is held as it came
        came = parts.in_parts(sent)
        wanted |= {name: x for name, x in values.items() if name in came}
    values = wanted
    before = live_fingerprints(updater.weights)
    updater.begin("v2", manifest=[(TensorMeta(n, x.dtype, tuple(x.shape)), fingerprint(x)) for n, x in sent.items()])
    if (sent_as, form) == ("int4", "int4-128"):
        with pytest.raises(ContentError, match="has groups of 32, but --cpu-weight-format int4-128 holds groups of 1"):
            updater.send(list(sent.items()))
        updater.drop("refused")
        assert live_fingerprints(updater.weights) == before
        return
    updater.send(list(sent.items()))
    updater.verify()
    result = updater.commit()
    assert result.digests.sent == digest_of(sent)
    assert result.digests.held == digest_of(values) != digest_of(tensors)
    assert live_fingerprints(updater.weights) == {name: fingerprint(x) for name, x in values.items()}


@pytest.mark.parametrize("mode", ["host", "journal"])
def test_a_refresh_that_fails_leaves_every_bit(folder: Path, ops: Ops, mode: StagingMode) -> None:
    updater, tensors = updater_of(folder, ops, mode), newer(folder)
    before = live_fingerprints(updater.weights)
    updater.begin("v2")
    names = sorted(tensors)
    updater.send([(name, tensors[name]) for name in names[::2]])
    tensors[names[1]][0] = float("nan")
    with pytest.raises(ContentError, match="not finite"):
        updater.send([(name, tensors[name]) for name in names[1::2]])
    updater.abort()
    assert live_fingerprints(updater.weights) == before


def test_a_delta_is_refused_by_its_flag(folder: Path, ops: Ops, form: str) -> None:
    updater = updater_of(folder, ops)
    (payload,) = DeltaEncoder(logical_tensors(folder).items()).encode(newer(folder).items()).payloads()
    frame = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    updater.begin("v2")
    with pytest.raises(TransactionStateError, match=rf"holds quantised values \(--cpu-weight-format {form}\)"):
        updater.receive(
            DeltaSource(LoopbackSource([("delta", frame)]), updater.weights, quantised=updater.model.quantised)
        )


def refresh(updater: LoopbackUpdater, tensors: Named, coverage: Coverage = "full") -> None:
    updater.begin("v2", coverage=coverage)
    updater.send(list(tensors.items()))
    updater.verify()
    updater.commit()


def test_a_reset_shows_what_a_refresh_leaves_out(folder: Path, ops: Ops, form: str) -> None:
    updater, tensors = updater_of(folder, ops), newer(folder)
    weights, names = updater.weights, sorted(tensors)
    refresh(updater, tensors)
    snapshot = take_snapshot(weights, keep_content=True)
    reset_tensors(weights, resettable(weights), weights.held_formats())
    assert {difference.name for difference in compare(weights, snapshot)} == set(names)
    largest = torch.finfo(torch.bfloat16).max / 255 * 254  # 8 bits have no NaN
    for name in weights.held_formats():
        values = weights.places(name)[0].read()
        assert bool((values == largest if form == "w8" else values.isnan()).all()), name
    refresh(updater, {name: tensors[name] for name in names[::2]}, coverage="partial")
    assert {difference.name for difference in compare(weights, snapshot)} == set(names[1::2])
    refresh(updater, tensors)
    assert compare(weights, snapshot) == []


class UsedAreas(Areas):
    """Memory in which other content was."""

    def take(
        self, key: int, num_bytes: int, device: torch.device | str, *, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().take(key, num_bytes, device, like=like).fill_(0xA5)


@pytest.mark.parametrize(("inner", "hidden"), [(64, 48), (48, 64), (32, 33)])
def test_memory_of_a_refresh_leaves_nothing_in_the_edges_of_rows(
    native: Ops, ops: Ops, tmp_path: Path, inner: int, hidden: int
) -> None:
    """Experts that move are compared by all of their bytes."""
    sizes = {"moe_intermediate_size": inner, "hidden_size": hidden}
    path = tiny_checkpoint(tmp_path / "m", "moe_dense_first", dtype="bfloat16", **sizes)
    weights = load_tiny(path, torch.bfloat16, ops=ops).weights
    storages = {name: weights.places(name)[0].storage for name in weights.held_formats()}
    before = {name: storage.clone() for name, storage in storages.items()}
    staging = ShadowStaging(weights, memory=UsedAreas())
    for name, tensor in logical_tensors(path).items():
        staging.write(name, tensor)
    staging.prepare()
    staging.commit()
    staging.close()
    assert all(torch.equal(now.view(torch.uint8), before[name].view(torch.uint8)) for name, now in storages.items())


def test_whole_matrices_go_by_tables_and_boxes_one_by_one(folder: Path, ops: Ops, form: str) -> None:
    weights = load_tiny(folder, torch.bfloat16, ops=ops).weights
    metas = [TensorMeta(name, x.dtype, tuple(x.shape)) for name, x in logical_tensors(folder).items()]
    formats, whole = weights.held_formats(), flat_layout(metas)
    (plan,) = Planner(TensorTable(weights.metas()), formats).plans(weights, [whole], cast=False)
    assert not plan.rest
    assert set(plan.pairs.names if plan.pairs else ()) == (set() if form == "w8" else formats.keys())
    boxed = metas[[meta.name for meta in metas].index(next(iter(formats)))]._replace(box=((0, 32), (0, 16)))
    (plan,) = Planner(TensorTable(weights.metas()), formats).plans(weights, [flat_layout([boxed])], cast=False)
    assert list(plan.rest) == [0]  # a block may lie in two boxes


def flat_layout(metas: Sequence[TensorMeta]) -> BucketLayout:
    """Return the layout of tensors one behind the other."""
    offsets = list(accumulate((meta.nbytes for meta in metas), initial=0))
    return BucketLayout(metas, offsets[:-1], offsets[-1])


# --- FP8 as it is published -------------------------------------------------------------------------------------------


def pairs_in(harness: Harness) -> dict[str, Pair]:
    """Return what is held of the experts, by name."""
    weights = harness.scheduler.runner.state.model.weights
    found = {name: weights.places(name)[0].saved() for name in weights.held_formats()}
    return {name: pair for name, pair in found.items() if isinstance(pair, Pair)}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of more than one block each way."""
    sizes = {"hidden_size": 192, "moe_intermediate_size": 256}
    return tiny_checkpoint(tmp_path_factory.mktemp("wide") / "m", "moe_dense_first", dtype="bfloat16", **sizes)


def with_scales(change: Callable[[torch.Tensor], torch.Tensor], tensors: Named) -> Named:
    return {name: change(x) if name.endswith("_scale_inv") else x for name, x in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_checkpoint_in_fp8_is_held_bit_for_bit(native: Ops, wide: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    # Scales that no rule of ours gives, so that nothing but a copy has them.
    odd = partial(with_scales, lambda scale: (scale * torch.linspace(1, 1.9, scale.numel()).view_as(scale)).to(dtype))
    path = fp8_checkpoint(tmp_path / "fp8", wide, odd)
    stored, harness = fp8_tensors(path), Harness(path, **settings_of("fp8"))
    pairs = pairs_in(harness)
    assert pairs.keys() == {name for name in stored if ".experts." in name and name.endswith("_proj.weight")} != set()
    for name, pair in pairs.items():
        assert torch.equal(pair.weight.view(torch.uint8), stored[name].view(torch.uint8))
        assert torch.equal(pair.scale, stored[f"{name}_scale_inv"].float())
    assert samples(harness) == samples(Harness(path, dtype="bfloat16"))


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}], ids=str)
def test_layouts_hold_the_bits_of_bfloat16_with_these_values(
    wide: Path, tmp_path: Path, form: str, layout: dict[str, int]
) -> None:
    found = []
    values = held_folder(wide, tmp_path / "held", form)
    for path, format_of in ((values, {"dtype": "bfloat16"}), (wide, settings_of(form))):
        with ParallelHarness(path, **layout, **format_of) as harness:
            found.append(samples(harness))
    assert found[0] == found[1]


@pytest.mark.parametrize("sent_as", ["bfloat16", "fp8", "int4"])
def test_a_refresh_of_ranks_leaves_what_a_start_does(wide: Path, tmp_path: Path, form: str, sent_as: str) -> None:
    sizes = {"hidden_size": 192, "moe_intermediate_size": 256}
    newer = tiny_checkpoint(tmp_path / "newer", "moe_dense_first", seed=5, dtype="bfloat16", **sizes)
    path = fp8_checkpoint(tmp_path / "fp8", newer) if sent_as == "fp8" else newer
    if sent_as == "int4":
        path = int4_checkpoint(tmp_path / "int4", newer, 128 if form == "int4-128" else 32)
    found = []
    for start, sends in ((wide, True), (path, False)):
        with ParallelHarness(start, tp_size=2, **settings_of(form)) as harness:
            if sends:
                answer = harness.control(UpdateWeightsFromDiskReqInput, model_path=str(path), weight_version="v2")
                assert answer.success, answer
            found.append(samples(harness))
    assert found[0] == found[1]


def test_a_piece_that_cuts_blocks_is_refused(native: Ops, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "odd", "moe_dense_first", dtype="bfloat16", moe_intermediate_size=96)
    updater = updater_of(path, compiled_ops(PackedHeld("fp8")))
    name, weight, scale = "model.layers.1.mlp.experts.gate_up_proj", *quantise(torch.randn(8, 192, 48))
    before = live_fingerprints(updater.weights)
    updater.begin("v2")
    with pytest.raises(ContentError, match=r"begins inside a block of .*: --cpu-weight-format fp8 holds whole blocks"):
        updater.send([(name, weight), (f"{name}_scale_inv", scale)])
    updater.abort()
    assert live_fingerprints(updater.weights) == before


def test_a_scale_that_the_kernels_do_not_take_is_refused(native: Ops, folder: Path) -> None:
    updater = updater_of(folder, compiled_ops(PackedHeld("fp8")))
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    weight, scale = quantise(torch.randn(updater.weights.metas()[name].shape) * 2**-9)
    weight = (weight.float() * 2**-16).to(weight.dtype)
    before = live_fingerprints(updater.weights)
    updater.begin("v2")
    with pytest.raises(ContentError, match=r"a scale of 2\*\*120 or more"):
        updater.send([(name, weight), (f"{name}_scale_inv", torch.full_like(scale, 2.0**120))])
    updater.abort()
    assert live_fingerprints(updater.weights) == before


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path, form: str) -> None:
    given = settings_of(form)
    with pytest.raises(StartupError, match="must be plain or w8 or fp8 or int4 or int4-128"):
        check_settings(ServerArgs(model_path=str(folder), cpu_weight_format="w4"))
    with pytest.raises(StartupError, match=f"{form} needs the compiled CPU operators and --dtype bfloat16"):
        Harness(folder, cpu_weight_format=form, dtype="float32")
    with pytest.raises(StartupError, match="needs the compiled CPU operators"):
        Harness(folder, **given, disable_native_kernels=True)
    with pytest.raises(StartupError, match=r"quantise the same weights: give one|this config.json has no quantization"):
        Harness(folder, **given, quantize_weight_updates=True)
    dense = tiny_checkpoint(tmp_path / "dense", "dense")
    with pytest.raises(StartupError, match=r"is for experts, and .* has none"):
        Harness(dense, **given, enable_return_routed_experts=False)
    with pytest.raises(StartupError, match=form):
        select_ops(torch.bfloat16, "cuda", True, form)
    odd = tiny_checkpoint(tmp_path / "odd", "moe_dense_first", dtype="bfloat16", moe_intermediate_size=48)
    block = max(HELD_FORMS[form].held.block)
    with pytest.raises(StartupError, match=f"must be multiples of {block}"), ParallelHarness(odd, tp_size=2, **given):
        pass


BITS = {"w8": 8 + 8 / 32, "fp8": 8 + 32 / 16 / 32, "int4": 4 + 16 / 32, "int4-128": 4 + 16 / 32}
"""The bits that an element takes, with its share of the scale."""


def test_memory_is_what_the_format_takes_and_said_so(tmp_path: Path, form: str) -> None:
    path = tiny_checkpoint(
        tmp_path / "wide", "moe_dense_first", dtype="bfloat16", moe_intermediate_size=64, hidden_size=64
    )
    experts = sum(x.numel() for name, x in stored_tensors(path).items() if ".experts." in name)
    plain, packed = (Harness(path, **each).ready.model_bytes for each in ({"dtype": "bfloat16"}, settings_of(form)))
    assert plain - packed == experts * (16 - BITS[form]) / 8
