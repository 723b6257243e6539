"""`WeightIndex`: every logical tensor can be written and read, in every form, under any placement."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.expert_location import ExpertLocationMetadata
from eplb.placement import ExpertPlacement
from rollout.families.registry import load_model_config
from rollout.kernels.ops import plain_ops
from rollout.layers.moe.experts import Experts
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.weight_loading import WeightIndex
from tests.logical_weights_fake import EMBED, FakeWeights, version
from tests.loopback_updater import new_updater, refresh
from tests.model_zoo import KINDS, load_tiny, logical_tensors, tiny_checkpoint, trivial_placement
from weight_sync.errors import (
    ContentError,
    CoverageError,
    ShapeMismatchError,
    TransactionStateError,
    UnknownTensorError,
)
from weight_sync.intake import load_weights
from weight_sync.ledger import WeightLedger
from weight_sync.staging import DirectSink
from weight_sync.tensor_meta import LogicalWeights, TensorMeta, parts_of


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("zoo") / "model", request.param, 3)


def _empty_model(folder: Path, placement: ExpertPlacement | None = None) -> DecoderForCausalLM:
    """Build a model whose every parameter is NaN, so that a place that was not written shows."""
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
    """Convert the tensors to the form of transformers 5: the experts of a layer in two tensors."""
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
def test_split_refuses_an_unknown_name_or_shape(
    tmp_path: Path, name: str, shape: tuple[int, ...], error: type[Exception]
) -> None:
    weights = _empty_model(tiny_checkpoint(tmp_path / "model", "moe", 0)).weights
    with pytest.raises(error, match=name.replace(".", r"\.")):
        weights.split(TensorMeta(name, torch.float32, shape))


def test_write_never_broadcasts_a_smaller_tensor(tmp_path: Path) -> None:
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


# --- refreshes that leave wrong bytes serving (B2) --------------------------------------------------------------------


F64 = torch.float64
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MOVED = torch.tensor([[7, 6, 5, 4, 3, 2, 1, 0, 3, 3], [1, 0, 2, 3, 4, 5, 7, 6, 0, 7]])  # with replicas
REPLICATED = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7, 0, 7]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of old and new weights, with tied embeddings and experts in every layer."""
    base = tmp_path_factory.mktemp("models")
    return (
        tiny_checkpoint(base / "old", "moe", seed=1, dtype="float64"),
        tiny_checkpoint(base / "new", "moe", seed=2, dtype="float64"),
    )


def is_loaded(model: DecoderForCausalLM, folder: Path, placement: ExpertPlacement | None = None) -> bool:
    """Return whether every byte in use equals the byte of a cold load of `folder` under `placement`."""
    fresh = load_tiny(folder, F64, placement)
    return all(torch.equal(ours, theirs) for ours, theirs in zip(model.tensors(), fresh.tensors(), strict=True))


def moved(rows: torch.Tensor) -> ExpertPlacement:
    return ExpertPlacement(ExpertLocationMetadata(rows, 8))


class InitialPlaces(WeightIndex):
    """A wrong index: it looks up the places of every tensor once, when the model is built."""

    def __init__(self, model: DecoderForCausalLM) -> None:
        super().__init__(model, {HEAD: EMBEDDING})
        self._initial = {name: list(entry.places()) for name, entry in self._entries.items()}

    def places(self, name: str) -> Sequence:
        return self._initial[name]

    def write(self, name: str, source: torch.Tensor) -> None:
        for place in self._initial[name]:
            place.write(source)


class FirstPlaceOnly(WeightIndex):
    """A wrong index: it forgets that an expert may have replicas."""

    def __init__(self, model: DecoderForCausalLM) -> None:
        super().__init__(model, {HEAD: EMBEDDING})

    def places(self, name: str) -> Sequence:
        return super().places(name)[:1]

    def write(self, name: str, source: torch.Tensor) -> None:
        self.places(name)[0].write(source)


def refreshed_after_a_move(folders: tuple[Path, Path], weights: Callable[[DecoderForCausalLM], LogicalWeights]) -> bool:
    """Start under one placement, adopt another, refresh; return whether all slots follow the new placement."""
    placement = moved(REPLICATED)
    model = load_tiny(folders[0], F64, placement)
    index = weights(model)
    placement.metadata = ExpertLocationMetadata(MOVED, 8)
    refresh(index, [list(logical_tensors(folders[1]).items())])
    return is_loaded(model, folders[1], moved(MOVED))


def test_37_vllm_55228_a_refresh_goes_by_the_placement_in_force(folders: tuple[Path, Path]) -> None:
    assert refreshed_after_a_move(folders, lambda model: model.weights)
    assert not refreshed_after_a_move(folders, InitialPlaces), "the wrong variant passes"


def test_38_prime_rl_3583_every_replica_is_refreshed(folders: tuple[Path, Path]) -> None:
    assert not refreshed_after_a_move(folders, FirstPlaceOnly), "the wrong variant passes"
    placement = moved(REPLICATED)
    model = load_tiny(folders[0], F64, placement)
    refresh(model.weights, [list(logical_tensors(folders[1]).items())])
    assert is_loaded(model, folders[1], placement)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_39_skyrl_1680_and_40_sglang_38298_any_split_in_any_order_is_one_load(
    folders: tuple[Path, Path], data: st.DataObject
) -> None:
    """Buckets cut at random through experts, gate and up, q, k and v: the result is the cold load."""
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    names = data.draw(st.permutations(sorted(tensors)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names) - 1), max_size=8)))
    edges = [0, *cuts, len(names)]
    refresh(model.weights, [[(name, tensors[name]) for name in names[a:b]] for a, b in itertools.pairwise(edges)])
    assert is_loaded(model, folders[1])


@pytest.mark.mutant
def test_40_a_fusion_that_lives_for_one_call_is_caught(folders: tuple[Path, Path]) -> None:
    """The wrong variant: gate and up are joined only where both came in one call, otherwise dropped."""
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    names = sorted(tensors)
    for bucket in (names[::2], names[1::2]):
        for name in bucket:
            other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
            half = next((part for part in other if part in name), None)
            if half is None or name.replace(half, other[half]) in bucket:
                model.weights.write(name, tensors[name])
    assert not is_loaded(model, folders[1])


class Rebinding(FakeWeights):
    """A wrong index: a write makes new storage."""

    def write(self, name: str, source: torch.Tensor) -> None:
        if name == EMBED:
            self.embed = source.clone()
        super().write(name, source)


def test_43_sglang_6265_storage_stays_where_it_is(folders: tuple[Path, Path]) -> None:
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    held = list(model.tensors())
    addresses = [tensor.data_ptr() for tensor in held]
    refresh(model.weights, [list(tensors.items())])
    assert [tensor.data_ptr() for tensor in model.tensors()] == addresses
    fresh = load_tiny(folders[1], F64)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(held, fresh.tensors(), strict=True))
    wrong = Rebinding(seed=1)
    address = wrong.embed.data_ptr()
    wrong.write(EMBED, version(2)[EMBED])
    assert wrong.embed.data_ptr() != address, "the comparison of addresses cannot fail"


@pytest.mark.parametrize("sent", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD), (HEAD, EMBEDDING)])
def test_50_vllm_51665_a_tied_head_follows_whichever_name_comes(
    folders: tuple[Path, Path], sent: tuple[str, ...]
) -> None:
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    embedding = tensors.pop(EMBEDDING)
    refresh(model.weights, [list(tensors.items()), *([(name, embedding.clone())] for name in sent)])
    assert head_follows(model, embedding) and is_loaded(model, folders[1])


def head_follows(model: DecoderForCausalLM, embedding: torch.Tensor) -> bool:
    hidden_ND = torch.randn(3, embedding.shape[1], dtype=F64, generator=torch.Generator().manual_seed(1))
    return torch.allclose(model.compute_logits(hidden_ND), hidden_ND @ embedding.T, rtol=1e-12, atol=1e-12)


@pytest.mark.mutant
def test_50_prime_rl_2438_a_head_with_a_copy_of_its_own_is_caught(folders: tuple[Path, Path]) -> None:
    """The wrong variant: the head was untied once, and serves step 0 for ever."""
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    model.lm_head.weight = model.lm_head.weight.clone()
    refresh(model.weights, [list(tensors.items())])
    assert not head_follows(model, tensors[EMBEDDING])


def test_50_two_names_with_two_contents_are_refused(folders: tuple[Path, Path]) -> None:
    model, tensors = load_tiny(folders[0], F64), logical_tensors(folders[1])
    updater = new_updater(model.weights)
    updater.begin("v2")
    updater.send(list(tensors.items()))
    with pytest.raises(ContentError):
        updater.send([(HEAD, tensors[EMBEDDING] + 1)])
    with pytest.raises(TransactionStateError):
        updater.verify()
    assert is_loaded(model, folders[0])


def test_the_placements_used_here_differ_in_every_layer(folders: tuple[Path, Path]) -> None:
    """Tests 37 and 38 need different placements."""
    trivial = trivial_placement(load_model_config(folders[0])).metadata.physical_to_logical_map
    for layer in range(2):
        assert not torch.equal(MOVED[layer], REPLICATED[layer])
        assert torch.equal(REPLICATED[layer][:8], trivial[layer])
