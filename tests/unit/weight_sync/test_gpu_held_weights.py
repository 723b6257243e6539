"""Experts and projections in 8 and 4 bits in the storage of CUDA (`row_places`), on the CPU: loads, refreshes, moves.

What is held must be what the same format holds on a CPU; no product is computed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.kernels.ops import Ops, RowMajorHeld, plain_ops
from rollout.kernels.row_places import ROW_FORMS, fp8_parts, int4_parts
from rollout.model.expert_slots import ModelExpertSlots
from tests.family_zoo import family_checkpoint
from tests.forward_harness import ForwardHarness
from tests.fp8_reference import fp8_checkpoint
from tests.fp8_reference import stored_tensors as fp8_tensors
from tests.held_reference import held_of
from tests.held_refresh import digest_of, newer, updater_of
from tests.model_zoo import load_tiny, logical_tensors, tiny_checkpoint
from tests.pair_forms import FORM_OF
from tests.unit.weight_sync.test_int4_loading import Int4Case
from weight_sync import shadow
from weight_sync.checker import live_fingerprints
from weight_sync.errors import ContentError
from weight_sync.fingerprint import fingerprint
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import Pair, TensorMeta

Named = dict[str, torch.Tensor]
MODES: tuple[StagingMode, ...] = ("host", "device", "journal", "in_place")
FORMS = pytest.mark.parametrize("form", ROW_FORMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of more than one block each way, which are cut at the edge."""
    sizes = {"hidden_size": 192, "moe_intermediate_size": 136}
    return tiny_checkpoint(tmp_path_factory.mktemp("held") / "plain", "moe_dense_first", dtype="bfloat16", **sizes)


@pytest.fixture(autouse=True)
def folds_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold tensors as they are written, as for weights on a device; only a kernel folds planned buckets.

    Memory of a device has no pages that could be traded.
    """
    monkeypatch.setattr(ShadowStaging, "_folds_early", lambda self, storage: True)
    monkeypatch.setattr(ShadowStaging, "takes_spans", False)
    monkeypatch.setattr(shadow, "tradable_spans", lambda pairs: [[] for _ in pairs])


def ops_of(form: str) -> Ops:
    return plain_ops().replace(storage=RowMajorHeld(form, torch.bfloat16, "cpu"))


def is_held(name: str) -> bool:
    """Return whether a tensor is of an expert or a projection; latents are made into keys and values as sent."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and "kv_b_proj" not in name


def held(tensors: Named, form: str) -> Named:
    return {name: held_of(form, x) if is_held(name) else x for name, x in tensors.items()}


@FORMS
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_load_quantises_experts_and_projections(family: str, form: str, tmp_path: Path) -> None:
    path = family_checkpoint(tmp_path / "plain", family, 3, torch.bfloat16)
    weights = load_tiny(path, torch.bfloat16, ops=ops_of(form)).weights
    wanted = held(logical_tensors(path), form)
    assert live_fingerprints(weights) == {name: fingerprint(x) for name, x in wanted.items()}
    assert weights.held_formats().keys() == set(filter(is_held, wanted)) != set()


def test_a_checkpoint_in_fp8_is_copied(folder: Path, tmp_path: Path) -> None:
    path = fp8_checkpoint(
        tmp_path / "fp8",
        folder,
        # Scales that no rule of ours gives, so that nothing but a copy has them.
        lambda tensors: {name: x * 1.37 if name.endswith("_scale_inv") else x for name, x in tensors.items()},
    )
    stored, weights = fp8_tensors(path), load_tiny(path, torch.bfloat16, ops=ops_of("fp8")).weights
    for name in weights.held_formats():
        pair: Any = weights.places(name)[0].saved()
        assert torch.equal(pair.weight.view(torch.uint8), stored[name].view(torch.uint8))
        assert torch.equal(pair.scale, stored[f"{name}_scale_inv"].float())


@pytest.mark.parametrize(("group", "form"), [(32, "int4"), (128, "int4"), (128, "int4-128")])
def test_a_checkpoint_in_int4_is_copied(group: int, form: str, tmp_path: Path) -> None:
    case = Int4Case(tmp_path / "int4", group)
    weights = load_tiny(case.int4, torch.bfloat16, ops=ops_of(form)).weights
    assert weights.held_formats().keys() > case.pairs.keys()
    for name, (integers, scales) in case.pairs.items():
        pair: Any = weights.places(name)[0].saved()
        assert torch.equal(pair.weight, integers)
        assert torch.equal(pair.scale[:, :: group // pair.block[1]], scales)


@FORMS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sent_as", ["bfloat16", "fp8", "int4"])
def test_a_refresh_keeps_both_fingerprints(folder: Path, form: str, mode: StagingMode, sent_as: str) -> None:
    if (sent_as, form) == ("int4", "int4-128"):
        return  # which is refused
    updater, tensors, parts = updater_of(folder, ops_of(form), mode), newer(folder), FORM_OF.get(sent_as)
    sent = tensors if parts is None else parts.quantised(tensors, lambda name, _: is_held(name))
    values = tensors if parts is None else parts.values_of(sent, torch.bfloat16)
    wanted = held(values, form)
    if parts is not None and sent_as == form:  # what has parts is held as it came
        came = parts.in_parts(sent)
        wanted |= {name: x for name, x in values.items() if name in came}
    values = wanted
    updater.begin("v2", manifest=[(TensorMeta(n, x.dtype, tuple(x.shape)), fingerprint(x)) for n, x in sent.items()])
    updater.send(list(sent.items()))
    updater.verify()
    result = updater.commit()
    assert result.digests.sent == digest_of(sent)
    assert result.digests.held == digest_of(values) != digest_of(tensors)
    assert live_fingerprints(updater.weights) == {name: fingerprint(x) for name, x in values.items()}


@FORMS
@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_a_refresh_leaves_the_rest(folder: Path, form: str, mode: StagingMode) -> None:
    updater, tensors = updater_of(folder, ops_of(form), mode), newer(folder)
    before, names = live_fingerprints(updater.weights), sorted(tensors)[::2]
    updater.begin("v2", coverage="partial")
    updater.send([(name, tensors[name]) for name in names])
    updater.verify()
    updater.commit()
    wanted = before | {name: fingerprint(x) for name, x in held({n: tensors[n] for n in names}, form).items()}
    assert live_fingerprints(updater.weights) == wanted != before


@FORMS
@pytest.mark.parametrize("mode", ["host", "journal"])
def test_a_refresh_that_fails_leaves_every_bit(folder: Path, form: str, mode: StagingMode) -> None:
    updater, tensors = updater_of(folder, ops_of(form), mode), newer(folder)
    storages = {name: updater.weights.places(name)[0].storage for name in updater.weights.held_formats()}
    before = {name: storage.view(torch.uint8).clone() for name, storage in storages.items()}
    updater.begin("v2")
    names = sorted(tensors)
    updater.send([(name, tensors[name]) for name in names[::2]])
    tensors[names[1]][0] = float("nan")
    with pytest.raises(ContentError, match="not finite"):
        updater.send([(name, tensors[name]) for name in names[1::2]])
    updater.abort()
    assert all(torch.equal(storage.view(torch.uint8), before[name]) for name, storage in storages.items())


@FORMS
def test_experts_move_with_their_scales(folder: Path, form: str) -> None:
    """A move copies the bytes of a slot, and nothing else."""
    model = load_tiny(folder, torch.bfloat16, ops=ops_of(form))
    slots, prefix = ModelExpertSlots(model), "model.layers.1.mlp.experts"
    pairs = {part: model.weights.places(f"{prefix}.0.{part}_proj.weight")[0].saved() for part in ("gate", "up", "down")}
    slots.write(0, 3, [part.clone() for part in slots.read(0, 0)])
    for part, pair in pairs.items():
        moved = model.weights.places(f"{prefix}.3.{part}_proj.weight")[0].saved()
        assert isinstance(moved, Pair) and isinstance(pair, Pair)
        assert torch.equal(moved.weight.view(torch.uint8), pair.weight.view(torch.uint8))
        assert torch.equal(moved.scale, pair.scale)


# --- in a model -------------------------------------------------------------------------------------------------------


def values_in(rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the values of rows [..., S] by their own scales, in bfloat16; plain rows as they are."""
    if rows.dtype == torch.bfloat16:
        return rows
    at, of_scales = (fp8_parts if rows.dtype == torch.float8_e4m3fn else int4_parts)(columns)
    scales = rows.view(torch.uint8)[..., at : at + of_scales].contiguous()
    if rows.dtype == torch.float8_e4m3fn:
        wide = scales.view(torch.float32).repeat_interleave(128, -1)
        return (rows[..., :columns].float() * wide[..., :columns]).bfloat16()
    halves = rows[..., :at].unflatten(-1, (-1, 32))
    integers = torch.stack((halves & 15, halves >> 4), -2).flatten(-3).float() - 8
    return (integers * scales.view(torch.bfloat16).float().repeat_interleave(32, -1))[..., :columns].bfloat16()


def dequantising(form: str) -> Ops:
    """Return operators that compute with held rows by plain torch, as the kernels do in registers."""
    plain = plain_ops()

    def linear(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        return plain.linear(hidden, values_in(weight, hidden.shape[1]), *rest)

    def norm_linear(x: Any, y: Any, norm: Any, eps: float, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        return plain.norm_linear(x, y, norm, eps, values_in(weight, x.shape[1]), *rest)

    def fused_experts(hidden: Any, ids: Any, shares: Any, w13: Any, w2: Any, inner: int, *rest: Any) -> torch.Tensor:
        matrices = values_in(w13, hidden.shape[1]), values_in(w2, inner)
        return plain.fused_experts(hidden, ids, shares, *matrices, inner, *rest)

    return ops_of(form).replace(linear=linear, norm_linear=norm_linear, fused_experts=fused_experts)


@FORMS
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_model_computes_with_the_values_that_it_holds(family: str, form: str, tmp_path: Path) -> None:
    path = family_checkpoint(tmp_path / "plain", family, 3, torch.bfloat16)
    holds, other = (load_tiny(path, torch.bfloat16, ops=ops) for ops in (dequantising(form), plain_ops()))
    for name in other.weights.metas():
        other.weights.write(name, holds.weights.places(name)[0].read())
    prompt = {0: [5, 17, 300, 2, 9, 41]}
    got, wanted = (ForwardHarness(model, 1, 32).step(prompt)[0] for model in (holds, other))
    assert torch.equal(got.log_probs, wanted.log_probs) and torch.equal(got.routes, wanted.routes)
    plain = ForwardHarness(load_tiny(path, torch.bfloat16, ops=plain_ops()), 1, 32).step(prompt)[0]
    assert not torch.equal(got.log_probs, plain.log_probs)
