"""Experts in 8 bits: values held by their definition, products with the bits of bfloat16 with these values, through
cold load, refresh and moves of experts."""

from __future__ import annotations

import math
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.messages.experts import EplbRebalanceReqInput
from rollout.kernels.ops import Ops, PackedW8, compiled_ops, select_ops
from tests import kernels
from tests.family_zoo import family_checkpoint
from tests.fp8_reference import quantise, values_of
from tests.loopback_updater import LoopbackSource, LoopbackUpdater
from tests.model_zoo import load_tiny, logical_tensors, stored_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness
from weight_sync.checker import live_fingerprints
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.errors import ContentError, TransactionStateError
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.int8_blocks import held_values
from weight_sync.receivers.delta import DeltaSource
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import TensorMeta

Named = dict[str, torch.Tensor]
PROMPTS = [[7, 3, 9], list(range(20, 50)), [5], [4] * 17, [9, 9, 1]]
MODES: tuple[StagingMode, ...] = ("host", "device", "journal", "in_place")
W8: dict[str, Any] = {"dtype": "bfloat16", "cpu_weight_format": "w8"}


@pytest.fixture(scope="module")
def native() -> Ops:
    return kernels.native_ops()


@pytest.fixture(scope="module")
def w8(native: Ops) -> Ops:
    return compiled_ops(PackedW8())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("w8") / "plain", "moe_dense_first", dtype="bfloat16")


def held(tensors: Named) -> Named:
    """Return the tensors as an engine with experts in 8 bits holds them."""
    is_expert = {name: ".experts." in name and name.endswith("_proj.weight") for name in tensors}
    return {name: held_values(tensor) if is_expert[name] else tensor for name, tensor in tensors.items()}


def held_folder(folder: Path, target: Path) -> Path:
    """Write a checkpoint of the held values, for an engine in bfloat16."""
    shutil.copytree(folder, target)
    for file in target.glob("*.safetensors*"):
        file.unlink()
    save_file({name: x.contiguous() for name, x in held(logical_tensors(folder)).items()}, target / "model.safetensors")
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


def test_numbers_that_are_not_finite_are_refused(w8: Ops) -> None:
    weight = torch.ones(32, 64, dtype=torch.bfloat16)
    weight[3, 40] = float("inf")
    with pytest.raises(ContentError, match="not finite"):
        held_values(weight)
    stored = w8.storage.empty_experts(1, 32, 64, torch.bfloat16, "cpu")
    with pytest.raises(ContentError, match="not finite"):
        w8.storage.expert_place(*stored, "up_proj", 0, 32, 64).write(weight)


# --- the operator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 5, 13, 60])
@pytest.mark.parametrize(("inner", "hidden"), [(32, 64), (40, 50), (7, 33), (96, 160)])
def test_products_have_the_bits_of_bfloat16_with_these_values(
    native: Ops, w8: Ops, inner: int, hidden: int, num_tokens: int
) -> None:
    torch.manual_seed(num_tokens)
    w13 = (torch.randn(5, 2 * inner, hidden) * torch.randn(5, 2 * inner, hidden).exp()).bfloat16()
    w13[1, 2:9] *= 1e-37  # the exponents' end
    w13[2, :, 3:40] = 0
    w2 = torch.randn(5, hidden, inner).bfloat16()
    x = torch.randn(num_tokens, hidden).bfloat16()
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, 3).bfloat16()
    expected = kernels.experts(native, x, ids, weights, held_values(w13), held_values(w2))
    stored = kernels.expert_weights(w8, w13, w2)
    assert torch.equal(w8.fused_experts(x, ids, weights, *stored), expected)
    assert not torch.equal(kernels.experts(native, x, ids, weights, w13, w2), expected)
    for part, content in (("gate_proj", w13[:, :inner]), ("up_proj", w13[:, inner:]), ("down_proj", w2)):
        for expert in range(5):
            place = w8.storage.expert_place(*stored[:2], part, expert, inner, hidden)  # type: ignore[arg-type]
            assert torch.equal(place.read(), held_values(content[expert]))
            other = place.rebind(torch.zeros_like(place.storage))
            other.restore(place.read())
            assert torch.equal(other.read(), place.read())


def test_rows_of_experts_in_8_bits_are_independent(w8: Ops) -> None:
    torch.manual_seed(0)
    stored = kernels.expert_weights(w8, torch.randn(8, 128, 96).bfloat16(), torch.randn(8, 96, 64).bfloat16())
    x, ids = torch.randn(50, 96).bfloat16(), torch.stack([torch.randperm(8)[:2] for _ in range(50)])
    weights = torch.rand(50, 2).bfloat16()
    assert kernels.rows_are_independent(lambda rows: w8.fused_experts(x[rows], ids[rows], weights[rows], *stored), 50)


# --- the engine -------------------------------------------------------------------------------------------------------


def samples(harness: Harness | ParallelHarness) -> list[tuple[list[int], list[float], bytes]]:
    found = harness.generate(PROMPTS, {"max_new_tokens": 12, "temperature": 1.0})
    return [(each.token_ids, each.logprobs, each.routes.tobytes()) for each in found]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_an_engine_samples_as_one_in_bfloat16_with_these_values(tmp_path: Path, family: str) -> None:
    path = family_checkpoint(tmp_path / "plain", family, 3, torch.bfloat16)
    same = samples(Harness(held_folder(path, tmp_path / "held"), dtype="bfloat16"))
    harness = Harness(path, **W8)
    assert samples(harness) == same != samples(Harness(path, dtype="bfloat16"))
    found, model = logical_tensors(path), harness.scheduler.runner.state.model
    assert all(torch.equal(model.weights.places(name)[0].read().float(), x.float()) for name, x in held(found).items())


def test_moved_experts_have_the_bits_of_bfloat16_that_was_moved(folder: Path, tmp_path: Path) -> None:
    layout = {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 2, "enable_eplb": True}
    found = []
    for path, format_of in ((held_folder(folder, tmp_path / "held"), {"dtype": "bfloat16"}), (folder, W8)):
        with ParallelHarness(path, **layout, **format_of) as harness:
            first = samples(harness)
            placement = harness.schedulers[0].runner.state.placement.metadata
            other = placement.physical_to_logical_map.flip(1).tolist()
            answer = harness.control(EplbRebalanceReqInput, physical_to_logical_map=other)
            assert answer.success and answer.data["rebalanced"], answer
            found.append((first, samples(harness)))
    assert found[0] == found[1]


def updater_of(folder: Path, w8: Ops, mode: StagingMode = "host") -> LoopbackUpdater:
    weights = load_tiny(folder, torch.bfloat16, ops=w8).weights
    formats = weights.held_formats()
    return LoopbackUpdater(
        weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine, staging=mode, quantised=formats
    )


def newer(folder: Path) -> Named:
    generator = torch.Generator().manual_seed(5)
    return {
        name: (x + 0.05 * torch.randn(x.shape, generator=generator)).bfloat16()
        for name, x in logical_tensors(folder).items()
    }


def digest_of(tensors: Named) -> str:
    return digest((TensorMeta(name, x.dtype, tuple(x.shape)), fingerprint(x)) for name, x in tensors.items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sent_as", ["bfloat16", "fp8"])
def test_a_refresh_keeps_the_fingerprints_of_what_was_sent_and_of_what_is_held(
    folder: Path, w8: Ops, mode: StagingMode, sent_as: str
) -> None:
    updater, tensors = updater_of(folder, w8, mode), newer(folder)
    sent = in_fp8(tensors) if sent_as == "fp8" else tensors
    values = held(values_of(sent, torch.bfloat16) if sent_as == "fp8" else tensors)
    updater.begin("v2", manifest=[(TensorMeta(n, x.dtype, tuple(x.shape)), fingerprint(x)) for n, x in sent.items()])
    updater.send(list(sent.items()))
    updater.verify()
    result = updater.commit()
    assert result.digests.sent == digest_of(sent)
    assert result.digests.held == digest_of(values) != digest_of(tensors)
    assert live_fingerprints(updater.weights) == {name: fingerprint(x) for name, x in values.items()}


def in_fp8(tensors: Named) -> Named:
    """Return the tensors with experts as FP8 pairs of weights and scales."""
    found: Named = {}
    for name, x in tensors.items():
        if ".experts." in name:
            found[name], found[f"{name}_scale_inv"] = quantise(x)
        else:
            found[name] = x
    return found


@pytest.mark.parametrize("mode", ["host", "journal"])
def test_a_refresh_that_fails_leaves_every_bit(folder: Path, w8: Ops, mode: StagingMode) -> None:
    updater, tensors = updater_of(folder, w8, mode), newer(folder)
    before = live_fingerprints(updater.weights)
    updater.begin("v2")
    names = sorted(tensors)
    updater.send([(name, tensors[name]) for name in names[::2]])
    tensors[names[1]][0] = float("nan")
    with pytest.raises(ContentError, match="not finite"):
        updater.send([(name, tensors[name]) for name in names[1::2]])
    updater.abort()
    assert live_fingerprints(updater.weights) == before


def test_a_delta_is_refused_by_its_flag(folder: Path, w8: Ops) -> None:
    updater = updater_of(folder, w8)
    (payload,) = DeltaEncoder(logical_tensors(folder).items()).encode(newer(folder).items()).payloads()
    frame = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    updater.begin("v2")
    with pytest.raises(TransactionStateError, match=r"holds quantised values \(--cpu-weight-format w8\)"):
        updater.receive(
            DeltaSource(LoopbackSource([("delta", frame)]), updater.weights, quantised=updater.model.quantised)
        )


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="must be plain or w8"):
        ServerArgs(model_path=str(folder), cpu_weight_format="w4").validate()
    with pytest.raises(StartupError, match="needs the compiled CPU operators and --dtype bfloat16"):
        Harness(folder, cpu_weight_format="w8", dtype="float32")
    with pytest.raises(StartupError, match="needs the compiled CPU operators"):
        Harness(folder, **W8, disable_native_kernels=True)
    with pytest.raises(StartupError, match="quantise the same weights: give one"):
        Harness(folder, **W8, quantize_weight_updates=True)
    dense = tiny_checkpoint(tmp_path / "dense", "dense")
    with pytest.raises(StartupError, match=r"is for experts, and .* has none"):
        Harness(dense, **W8, enable_return_routed_experts=False)
    with pytest.raises(StartupError, match="w8"):
        select_ops(torch.bfloat16, "cuda", True, "w8")
    odd = tiny_checkpoint(tmp_path / "odd", "moe_dense_first", dtype="bfloat16", moe_intermediate_size=48)
    with pytest.raises(StartupError, match="must be multiples of 32"), ParallelHarness(odd, tp_size=2, **W8):
        pass


def test_memory_is_half_and_said_so(tmp_path: Path) -> None:
    path = tiny_checkpoint(
        tmp_path / "wide", "moe_dense_first", dtype="bfloat16", moe_intermediate_size=64, hidden_size=64
    )
    stored = stored_tensors(path)
    experts = sum(x.nbytes for name, x in stored.items() if ".experts." in name)
    plain, packed = (Harness(path, **each).ready.model_bytes for each in ({"dtype": "bfloat16"}, W8))
    assert plain - packed == experts // 2 - experts // 64
