"""`WeightIndex`: every logical tensor can be written and read, in every form, under any placement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eplb.expert_location import ExpertLocationMetadata
from eplb.placement import ExpertPlacement
from rollout.families.registry import load_model_config
from rollout.kernels.ops import plain_ops
from rollout.layers.moe.experts import Experts
from rollout.model.decoder import DecoderForCausalLM
from tests.model_zoo import KINDS, load_tiny, logical_tensors, tiny_checkpoint, trivial_placement
from weight_sync.errors import CoverageError, ShapeMismatchError, UnknownTensorError
from weight_sync.loading import WeightLedger, load_weights
from weight_sync.staging import DirectSink
from weight_sync.tensor_meta import TensorMeta, parts_of


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("zoo") / "model", request.param, 3)


def _empty_model(folder: Path, placement: ExpertPlacement | None = None) -> DecoderForCausalLM:
    """Every byte of every parameter is NaN, so that a place that was not written shows."""
    config = load_model_config(folder)
    placement = placement or trivial_placement(config)
    model = DecoderForCausalLM(config, torch.float32, "cpu", placement, plain_ops())
    for tensor in model.tensors():
        tensor.fill_(float("nan"))
    return model


def _experts(model: DecoderForCausalLM, layer: int) -> Experts:
    experts = dict(model.named_layers())[f"model.layers.{layer}.mlp.experts"]
    assert isinstance(experts, Experts)
    return experts


def _all_written(model: DecoderForCausalLM) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in model.tensors())


def _fused(tensors: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """The form of transformers 5: experts of a layer in two tensors."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}:
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(num_experts)])
            for part in ("gate", "up", "down")
        )
        result[f"{prefix}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        result[f"{prefix}.down_proj"] = down
    return result


def _load(model: DecoderForCausalLM, tensors: dict[str, torch.Tensor]) -> None:
    ledger = WeightLedger(model.weights.metas())
    load_weights(model.weights, tensors.items(), DirectSink(model.weights), ledger, cast=False)
    ledger.settle()


def test_metas_are_the_tensors_of_the_checkpoint(folder: Path) -> None:
    metas = _empty_model(folder).weights.metas()
    assert {name: meta.shape for name, meta in metas.items()} == {
        name: tuple(tensor.shape) for name, tensor in logical_tensors(folder).items()
    }
    assert {meta.dtype for meta in metas.values()} == {torch.float32}


def test_what_is_written_is_read_and_fills_the_model(folder: Path) -> None:
    model, tensors = _empty_model(folder), logical_tensors(folder)
    addresses = [tensor.data_ptr() for tensor in model.tensors()]
    for name, tensor in tensors.items():
        assert not _all_written(model), f"the model was full before {name}"
        model.weights.write(name, tensor)
    assert _all_written(model)
    for name, tensor in tensors.items():
        assert torch.equal(parts_of(model.weights, name)[0].content, tensor), name
    assert addresses == [tensor.data_ptr() for tensor in model.tensors()]


def test_fused_and_per_expert_forms_give_the_same_model(folder: Path) -> None:
    tensors, plain, fused = logical_tensors(folder), _empty_model(folder), _empty_model(folder)
    _load(plain, tensors)
    _load(fused, _fused(tensors, plain.config.num_experts))
    for ours, theirs in zip(plain.tensors(), fused.tensors(), strict=True):
        assert torch.equal(ours, theirs)


def test_swapped_halves_of_a_fused_tensor_are_noticed(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "moe", 3)
    tensors, right, wrong = logical_tensors(folder), _empty_model(folder), _empty_model(folder)
    _load(right, tensors)
    swapped = {
        name: torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1) if name.endswith("gate_up_proj") else tensor
        for name, tensor in _fused(tensors, 8).items()
    }
    _load(wrong, swapped)
    assert not all(torch.equal(a, b) for a, b in zip(right.tensors(), wrong.tensors(), strict=True))


def test_every_replica_is_written(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "moe", 4)
    rows = torch.tensor([[7, 6, 5, 4, 3, 2, 1, 0, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7, 0, 7]])
    model = _empty_model(folder, ExpertPlacement(ExpertLocationMetadata(rows, 8)))
    tensors = logical_tensors(folder)
    _load(model, tensors)
    assert _all_written(model)
    for layer, row in enumerate(rows.tolist()):
        prefix = f"model.layers.{layer}.mlp.experts"
        experts = _experts(model, layer)
        for slot, logical in enumerate(row):
            gate, up = experts.w13[slot].chunk(2)
            assert torch.equal(gate, tensors[f"{prefix}.{logical}.gate_proj.weight"])
            assert torch.equal(up, tensors[f"{prefix}.{logical}.up_proj.weight"])
            assert torch.equal(experts.w2[slot], tensors[f"{prefix}.{logical}.down_proj.weight"])


def test_slots_are_asked_for_at_write_time(tmp_path: Path) -> None:
    """A placement adopted after the model was built decides where the next write goes."""
    folder = tiny_checkpoint(tmp_path / "model", "moe", 4)
    placement = trivial_placement(load_model_config(folder))
    model = _empty_model(folder, placement)
    placement.metadata = ExpertLocationMetadata(torch.arange(7, -1, -1).expand(2, -1).clone(), 8)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    model.weights.write(name, logical_tensors(folder)[name])
    written = _experts(model, 1).w2.isfinite().all(-1).all(-1)
    assert written.nonzero().flatten().tolist() == [5]


def test_the_tied_head_is_an_alias_of_the_embedding(tmp_path: Path) -> None:
    model = load_tiny(tiny_checkpoint(tmp_path / "model", "moe", 0), torch.float32)
    assert "lm_head.weight" not in model.weights.metas()
    embedding = model.weights.metas()["model.embed_tokens.weight"]
    pieces = model.weights.split(TensorMeta("lm_head.weight", embedding.dtype, embedding.shape))
    assert [piece.name for piece in pieces] == ["model.embed_tokens.weight"]
    assert model.weights.canonical_name("lm_head.weight") == "model.embed_tokens.weight"
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_untied_head_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    model = load_tiny(tiny_checkpoint(tmp_path / "model", "dense", 0), torch.float32)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= model.weights.metas().keys()


@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        ("model.layers.0.mlp.experts.8.up_proj.weight", (32, 48), UnknownTensorError),
        ("model.layers.9.input_layernorm.weight", (48,), UnknownTensorError),
        ("model.layers.0.mlp.gate_proj.weight", (64, 48), UnknownTensorError),
        ("model.layers.0.self_attn.qkv_proj.weight", (128, 48), UnknownTensorError),
        ("model.layers.0.mlp.experts.0.up_proj.weight", (48, 32), ShapeMismatchError),
        ("model.layers.0.mlp.experts.gate_up_proj", (8, 32, 48), ShapeMismatchError),
        ("model.layers.0.self_attn.q_norm.weight", (64,), ShapeMismatchError),
        ("lm_head.weight", (321, 48), ShapeMismatchError),
    ],
)
def test_split_refuses(tmp_path: Path, name: str, shape: tuple[int, ...], error: type[Exception]) -> None:
    weights = _empty_model(tiny_checkpoint(tmp_path / "model", "moe", 0)).weights
    with pytest.raises(error, match=name.replace(".", r"\.")):
        weights.split(TensorMeta(name, torch.float32, shape))


def test_write_never_broadcasts(tmp_path: Path) -> None:
    weights = _empty_model(tiny_checkpoint(tmp_path / "model", "moe", 0)).weights
    for source in (torch.ones(()), torch.ones(1), torch.ones(48, 1)):
        with pytest.raises(ShapeMismatchError):
            weights.write("model.norm.weight", source)
    with pytest.raises(UnknownTensorError, match=r"nearest that it has is 'model\.norm\.weight'"):
        weights.write("model.norm.weigth", torch.ones(48))


def test_full_coverage_notices_one_missing_tensor(folder: Path) -> None:
    tensors, model = logical_tensors(folder), _empty_model(folder)
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    with pytest.raises(CoverageError, match=r"model\.layers\.1\.self_attn\.k_norm\.weight"):
        _load(model, tensors)
