"""Projections in 8 and 4 bits: products with the bits of bfloat16 with the values held, through cold load, refresh and
layouts of ranks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.messages.weights import UpdateWeightsFromDiskReqInput
from rollout.kernels.held_places import HELD_FORMS
from rollout.kernels.ops import Ops, PackedHeld, compiled_ops
from rollout.layers.linear import plain_linears
from tests import kernels
from tests.family_zoo import family_checkpoint
from tests.fp8_reference import fp8_checkpoint, set_config
from tests.fp8_reference import stored_tensors as fp8_tensors
from tests.held_reference import held_of, int4, int4_values
from tests.held_refresh import digest_of, newer, updater_of
from tests.model_zoo import logical_tensors, stored_tensors, tiny_checkpoint
from tests.pair_forms import int4_config, int4_parts
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness
from weight_sync.checker import live_fingerprints, reset_tensors
from weight_sync.errors import ContentError
from weight_sync.fingerprint import fingerprint
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import Pair

Named = dict[str, torch.Tensor]
PROMPTS = [[7, 3, 9], list(range(20, 50)), [5], [4] * 17, [9, 9, 1]]
PLAIN: dict[str, Any] = {"dtype": "bfloat16", "enable_return_routed_experts": False}
FORMATS = ("w8", "fp8", "int4", "int4-128")
# Embeddings, routers, norms and gates are left out, and so is what latent attention applies to its cache.
PROJECTION = re.compile(
    r".*(self_attn\.(q|k|v|o|q_a|q_b)_proj|self_attn\.kv_a_proj_with_mqa|linear_attn\.out_proj"
    r"|(mlp|shared_experts?)\.(gate|up|down)_proj)\.weight"
)


def settings_of(form: str) -> dict[str, Any]:
    return PLAIN | {"cpu_linear_format": form}


@pytest.fixture(scope="module", params=FORMATS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def native() -> Ops:
    return kernels.native_ops()


@pytest.fixture(scope="module")
def ops(native: Ops, form: str) -> Ops:
    return compiled_ops(PackedHeld(linears=form))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("held") / "plain", "moe_dense_first", dtype="bfloat16")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose projections are more than one block each way, and whole blocks on each of two ranks."""
    return tiny_checkpoint(tmp_path_factory.mktemp("wide") / "m", "dense", dtype="bfloat16", **WIDE)


WIDE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "heads": 4, "kv_heads": 2, "head_dim": 128}


def held(tensors: Named, form: str) -> Named:
    """Return the tensors as an engine with projections in this form holds them."""
    return {name: held_of(form, x) if PROJECTION.fullmatch(name) else x for name, x in tensors.items()}


def held_folder(folder: Path, target: Path, form: str) -> Path:
    """Write a checkpoint of the held values, for an engine in bfloat16."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    values = {name: x.contiguous() for name, x in held(logical_tensors(folder), form).items()}
    save_file(values, target / "model.safetensors")
    return target


def samples(harness: Harness | ParallelHarness) -> list[tuple[list[int], list[float]]]:
    found = harness.generate(PROMPTS, {"max_new_tokens": 12, "temperature": 1.0})
    return [(each.token_ids, each.logprobs) for each in found]


# --- the operators ----------------------------------------------------------------------------------------------------


def stored_parts(ops: Ops, parts: list[torch.Tensor]) -> torch.Tensor:
    """Store matrices one after the other in one held matrix; check that they read back, also one by one elsewhere."""
    form = ops.storage.linears
    assert form is not None
    depth, rows = parts[0].shape[1], sum(len(part) for part in parts)
    storage, first = form.empty([], rows, depth), 0
    places = []
    for part in parts:
        places.append(form.place(storage, range(first, first + len(part)), depth, 1, 0))
        first += len(part)
    for place, part in zip(places, parts, strict=True):
        place.write(part)
    for place, part in zip(places, parts, strict=True):
        assert torch.equal(place.read(), form.held.values(part))
        other = place.rebind(torch.zeros_like(storage))
        other.restore(place.saved())
        assert torch.equal(other.read(), place.read())
    return storage


@pytest.mark.parametrize("num_tokens", [1, 5, 13, 60])
@pytest.mark.parametrize(
    ("sizes", "depth"), [((64,), 64), ((32, 16, 16), 96), ((144, 48, 39), 160), ((7,), 33)], ids=str
)
def test_products_have_the_bits_of_bfloat16_with_these_values(
    native: Ops, ops: Ops, form: str, sizes: tuple[int, ...], depth: int, num_tokens: int
) -> None:
    torch.manual_seed(num_tokens)
    weight = (torch.randn(sum(sizes), depth) * torch.randn(sum(sizes), depth).exp()).bfloat16()
    weight[2:5] *= 1e-37  # the exponents' end
    parts = list(weight.split(sizes))
    values = torch.cat([held_of(form, part) for part in parts])
    x, bias = torch.randn(num_tokens, depth).bfloat16(), torch.randn(sum(sizes)).bfloat16()
    stored, rows = stored_parts(ops, parts), sum(sizes)
    plain = kernels.matrix(native, values)
    expected = native.linear(x, plain, rows, bias)
    assert torch.equal(ops.linear(x, stored, rows, bias), expected)
    assert not torch.equal(native.linear(x, kernels.matrix(native, weight), rows, bias), expected)
    found = []
    for matrix, which in ((plain, native), (stored, ops)):
        residual = x.clone()
        found.append((which.norm_linear(residual, x, torch.ones(depth).bfloat16(), 1e-6, matrix, rows, bias), residual))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_rows_of_products_are_independent(ops: Ops) -> None:
    torch.manual_seed(0)
    stored, x = stored_parts(ops, [torch.randn(160, 96).bfloat16()]), torch.randn(50, 96).bfloat16()
    assert kernels.rows_are_independent(lambda rows: ops.linear(x[rows], stored, 160), 50)


def test_a_weight_of_another_size_or_dtype_is_refused(ops: Ops) -> None:
    stored = stored_parts(ops, [torch.randn(64, 96).bfloat16()])
    with pytest.raises(RuntimeError, match="the packed weight is not"):
        ops.linear(torch.randn(2, 96).bfloat16(), stored, 65)
    with pytest.raises(RuntimeError, match="go with bfloat16 rows"):
        ops.linear(torch.randn(2, 96), stored, 64)


def test_rows_that_would_share_a_scale_are_refused(native: Ops) -> None:
    form = HELD_FORMS["fp8"]
    place = form.place(form.empty([], 64, 32), range(8, 24), 32, 1, 0)
    with pytest.raises(RuntimeError, match="must not share a scale"):
        place.write(torch.randn(16, 32).bfloat16())


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_an_engine_samples_as_one_in_bfloat16_with_these_values(tmp_path: Path, family: str, form: str) -> None:
    path = family_checkpoint(tmp_path / "plain", family, 3, torch.bfloat16)
    weights = Harness(path, **settings_of(form)).scheduler.runner.state.model.weights
    # Gates of attention make another order of rows than blocks of 128 rows have.
    left_out = {"q_proj", "k_proj", "v_proj"} if (family, form) == ("qwen3_next", "fp8") else set()
    expected = {name for name in logical_tensors(path) if PROJECTION.fullmatch(name)}
    expected = {name for name in expected if name.split(".")[-2] not in left_out}
    assert weights.held_formats().keys() == expected != set()
    target = held_folder(path, tmp_path / "held", form)
    if left_out:
        tensors = stored_tensors(target) | {k: x for k, x in logical_tensors(path).items() if k not in expected}
        save_file({name: x.contiguous() for name, x in tensors.items()}, target / "model.safetensors")
    same = samples(Harness(target, **PLAIN))
    assert samples(Harness(path, **settings_of(form))) == same != samples(Harness(path, **PLAIN))
    for name, x in stored_tensors(target).items():
        assert torch.equal(weights.places(name)[0].read().float(), x.float()), name


def test_experts_and_projections_may_have_formats_of_their_own(folder: Path, tmp_path: Path) -> None:
    both = Harness(folder, **PLAIN, cpu_weight_format="int4", cpu_linear_format="fp8")
    values = held_folder(folder, tmp_path / "held", "fp8")
    assert samples(both) == samples(Harness(values, **PLAIN, cpu_weight_format="int4"))
    formats = both.scheduler.runner.state.model.weights.held_formats()
    assert {held.flag for held in formats.values()} == {"--cpu-weight-format int4", "--cpu-linear-format fp8"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_in_fp8_is_held_bit_for_bit(native: Ops, wide: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    def odd(tensors: Named) -> Named:  # scales that no rule of ours gives, so that nothing but a copy has them
        return {name: _odd(x).to(dtype) if name.endswith("_scale_inv") else x for name, x in tensors.items()}

    path = fp8_checkpoint(tmp_path / "fp8", wide, odd)
    stored, harness = fp8_tensors(path), Harness(path, **settings_of("fp8"))
    weights = harness.scheduler.runner.state.model.weights
    assert weights.held_formats().keys() == {name for name in stored if PROJECTION.fullmatch(name)}
    for name in weights.held_formats():
        pair = weights.places(name)[0].saved()
        assert isinstance(pair, Pair)
        assert torch.equal(pair.weight.view(torch.uint8), stored[name].view(torch.uint8))
        assert torch.equal(pair.scale, stored[f"{name}_scale_inv"].float())
    assert samples(harness) == samples(Harness(path, **PLAIN))


def _odd(scale: torch.Tensor) -> torch.Tensor:
    return scale * torch.linspace(1, 1.9, scale.numel()).view_as(scale)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("group", [32, 128])
def test_a_checkpoint_in_int4_is_held_bit_for_bit(native: Ops, tmp_path: Path, group: int, ranks: int) -> None:
    """On two ranks the columns of a rank end inside a group of 128, of which the engine makes groups of 32."""
    path = tiny_checkpoint(tmp_path / "m", "dense", dtype="bfloat16", **WIDE | {"intermediate_size": 384})
    tensors = logical_tensors(path)
    names = {name for name in tensors if PROJECTION.fullmatch(name) and tensors[name].shape[1] % group == 0}
    pairs = {name: int4(tensors[name].bfloat16(), group) for name in names}
    stored = {name: x for name, x in tensors.items() if name not in names}
    values = held(stored, "int4") | {name: int4_values(*pair, group, torch.bfloat16) for name, pair in pairs.items()}
    for name, (integers, scales) in pairs.items():
        stored |= int4_parts(name, integers, scales)
    given, found = PLAIN | {"tp_size": ranks}, list[Any]()
    for target, content, form in ((tmp_path / "int4", stored, "int4"), (tmp_path / "values", values, "plain")):
        shutil.copytree(path, target, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({name: x.contiguous() for name, x in content.items()}, target / "model.safetensors")
        if form == "int4":
            set_config(target, int4_config(group))
        with ParallelHarness(target, **given, cpu_linear_format=form) as harness:
            found.append(samples(harness))
            weights = harness.schedulers[0].runner.state.model.weights
            for name in names if (ranks, form) == (1, "int4") else ():
                pair = weights.places(name)[0].saved()
                assert isinstance(pair, Pair) and torch.equal(pair.weight, pairs[name][0])
                assert torch.equal(pair.scale[:, :: group // 32], pairs[name][1])
    assert found[0] == found[1]


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_layouts_hold_the_bits_of_bfloat16_with_these_values(wide: Path, tmp_path: Path, form: str) -> None:
    found = []
    values = held_folder(wide, tmp_path / "held", form)
    for path, format_of in ((values, PLAIN), (wide, settings_of(form))):
        with ParallelHarness(path, tp_size=2, **format_of) as harness:
            assert reasons_of(harness) == {}
            found.append(samples(harness))
    assert found[0] == found[1]


def reasons_of(harness: ParallelHarness) -> dict[str, str]:
    """Return why projections are bfloat16, which all ranks agree on."""
    first, *others = (plain_linears(scheduler.runner.state.model) for scheduler in harness.schedulers)
    assert all(each == first for each in others)
    return first


def test_projections_whose_blocks_a_rank_cuts_are_bfloat16_and_said_so(folder: Path, tmp_path: Path) -> None:
    cut = {
        "model.layers.*.self_attn.qkv_proj": "32 rows of q_proj on a rank cut blocks of 128",
        "model.layers.*.self_attn.o_proj": "32 columns on a rank cut blocks of 128",
        "model.layers.*.mlp.gate_up_proj": "32 rows of gate_proj on a rank cut blocks of 128",
        "model.layers.*.mlp.down_proj": "32 columns on a rank cut blocks of 128",
    }
    with ParallelHarness(folder, tp_size=2, **settings_of("fp8")) as harness:
        assert reasons_of(harness) == cut
        found = samples(harness)
    with ParallelHarness(folder, tp_size=2, **PLAIN) as harness:
        assert samples(harness) == found
    odd = tiny_checkpoint(tmp_path / "odd", "dense", dtype="bfloat16", heads=3, kv_heads=1, head_dim=8)
    harness_of_one = Harness(odd, **settings_of("fp8"))
    assert plain_linears(harness_of_one.scheduler.runner.state.model) == {
        "model.layers.*.self_attn.qkv_proj": "k_proj begins at row 24, and 16 rows share a scale"
    }


@pytest.mark.parametrize("sent_as", ["bfloat16", "fp8"])
def test_a_refresh_of_ranks_leaves_what_a_start_does(wide: Path, tmp_path: Path, form: str, sent_as: str) -> None:
    newer = tiny_checkpoint(tmp_path / "newer", "dense", seed=5, dtype="bfloat16", **WIDE)
    path = fp8_checkpoint(tmp_path / "fp8", newer) if sent_as == "fp8" else newer
    given = settings_of(form) | {"tp_size": 2}
    found = []
    for start, sends in ((wide, True), (path, False)):
        with ParallelHarness(start, **given) as harness:
            if sends:
                answer = harness.control(UpdateWeightsFromDiskReqInput, model_path=str(path), weight_version="v2")
                assert answer.success, answer
            found.append(samples(harness))
    assert found[0] == found[1]


# --- a refresh --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["host", "device", "journal", "in_place"])
def test_a_refresh_keeps_both_fingerprints_and_a_failing_one_every_bit(
    folder: Path, ops: Ops, form: str, mode: StagingMode
) -> None:
    updater, tensors = updater_of(folder, ops, mode), newer(folder)
    updater.begin("v2")
    updater.send(list(tensors.items()))
    updater.verify()
    result = updater.commit()
    values = held(tensors, form)
    assert result.digests.sent == digest_of(tensors)
    assert result.digests.held == digest_of(values) != digest_of(tensors)
    assert live_fingerprints(updater.weights) == {name: fingerprint(x) for name, x in values.items()}
    if mode == "in_place":
        return
    bad = dict(tensors)
    name = next(name for name in bad if PROJECTION.fullmatch(name))
    bad[name] = bad[name].clone()
    bad[name][3, 4] = float("inf")
    updater.begin("v3")
    with pytest.raises(ContentError, match="not finite"):
        updater.send(list(bad.items()))
    updater.abort()
    assert live_fingerprints(updater.weights) == {name: fingerprint(x) for name, x in values.items()}


def test_a_reset_shows_in_every_projection(folder: Path, ops: Ops, form: str) -> None:
    updater = updater_of(folder, ops)
    weights, formats = updater.weights, updater.weights.held_formats()
    reset_tensors(weights, list(formats), formats)
    largest = torch.finfo(torch.bfloat16).max / 255 * 254  # 8 bits have no NaN
    for name in formats:
        values = weights.places(name)[0].read()
        assert bool((values == largest if form == "w8" else values.isnan()).all()), name


# --- refusals and memory ----------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused(folder: Path, form: str) -> None:
    with pytest.raises(StartupError, match="--cpu-linear-format must be plain or w8 or fp8 or int4 or int4-128"):
        check_settings(ServerArgs(model_path=str(folder), cpu_linear_format="w4"))
    with pytest.raises(StartupError, match=f"--cpu-linear-format {form} needs the compiled CPU operators and --dtype"):
        Harness(folder, cpu_linear_format=form, dtype="float32")
    with pytest.raises(StartupError, match=r"--cpu-linear-format .* needs the compiled CPU operators"):
        Harness(folder, **settings_of(form), disable_native_kernels=True)
    with pytest.raises(StartupError, match=r"quantise the same weights: give one|this config.json has no quantization"):
        Harness(folder, **settings_of(form), quantize_weight_updates=True)


BITS = {"w8": 8 + 8 / 32, "fp8": 8 + 32 / 16 / 32, "int4": 4 + 16 / 32, "int4-128": 4 + 16 / 32}
"""The bits that an element takes, with its share of the scale."""


def test_memory_is_what_the_format_takes_and_said_so(wide: Path, form: str) -> None:
    linears = sum(x.numel() for name, x in stored_tensors(wide).items() if PROJECTION.fullmatch(name))
    plain, packed_ = (Harness(wide, **PLAIN, **each).ready.model_bytes for each in ({}, {"cpu_linear_format": form}))
    assert plain - packed_ == linears * (16 - BITS[form]) / 8
