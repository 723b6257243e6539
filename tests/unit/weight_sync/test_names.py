"""Names that a model does not know: the message about them, which costs the same however many there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.core.errors import StartupError
from rollout.layers.layer import Layer
from rollout.layers.weight_entry import WeightEntry, WeightLayer
from rollout.model.weight_loading import WeightIndex
from tests.loopback_updater import LoopbackSource, LoopbackUpdater, Named, new_updater
from tests.model_zoo import load_tiny, logical_tensors, tiny_checkpoint
from weight_sync import unknown_names
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.errors import (
    DtypeMismatchError,
    ShapeMismatchError,
    TransportError,
    UnknownTensorError,
    WeightRequestError,
)
from weight_sync.fingerprint import fingerprint
from weight_sync.receivers.delta import DeltaSource
from weight_sync.receivers.disk import DiskSource
from weight_sync.tensor_meta import Piece, TensorMeta
from weight_sync.transaction import WeightTransaction
from weight_sync.unknown_names import MAX_LENGTH, NearestName, is_derived

LAYERS, EXPERTS = 81, 128
COUNT = 31_104
SHOWN = 3
"""Names in a message."""
COMPARED = 40
"""The most names that one search compares: 16 from the start, 16 from the end, 8 with the same numbers and end."""
PREFIXES = ("module.", "_fsdp_wrapped_module.", "base_model.model.", "a.very.deep.module.of.wrappers.around.the.")


class Experts(WeightLayer):
    """The matrices of the experts of a large model, which lie nowhere."""

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                for projection in ("gate", "up", "down"):
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                    yield WeightEntry(name, (256, 128), torch.bfloat16, lambda: ())


class Model(Layer):
    def __init__(self) -> None:
        self.experts = Experts()


@pytest.fixture(scope="module")
def large() -> WeightIndex:
    index = WeightIndex(Model(), {})
    assert len(index.metas()) == COUNT
    return index


def begin(weights: WeightIndex, metas: Sequence[TensorMeta]) -> str:
    """Return why a manifest of `metas` is refused."""
    with pytest.raises(UnknownTensorError) as refused:
        WeightTransaction(weights, manifest=[(meta, None) for meta in metas])
    return str(refused.value)


class Searches:
    """Counts the searches for a nearest name, and the names that each compares: all that such a message costs.

    A search sets its matcher up for one name, and asks it for the ratio of each name that it compares with that.
    """

    def __init__(self) -> None:
        self.compared: list[int] = []
        self.longest = 0

    def require_few(self) -> None:
        """Check that there were no more searches than a message has names, and none through many names."""
        assert len(self.compared) <= SHOWN
        assert max(self.compared, default=0) <= COMPARED and self.longest <= MAX_LENGTH


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    counted = Searches()

    class Matcher(difflib.SequenceMatcher[str]):
        def __init__(self, **names: Any) -> None:
            super().__init__(**names)
            counted.compared.append(0)
            counted.longest = max(counted.longest, len(names["b"]))

        def ratio(self) -> float:
            counted.compared[-1] += 1
            return super().ratio()

    monkeypatch.setattr(difflib, "SequenceMatcher", Matcher)
    return counted


# --- a whole model under other names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_whole_model_under_another_prefix_costs_three_searches(
    large: WeightIndex, searches: Searches, prefix: str
) -> None:
    """D1: the message has three names, each with the nearest known name, and the number of the others."""
    metas = [TensorMeta(f"{prefix}{meta.name}", meta.dtype, meta.shape) for meta in large.metas().values()]
    message = begin(large, metas)
    assert len(searches.compared) == SHOWN
    searches.require_few()
    for name in list(large.metas())[:SHOWN]:
        assert f"the model has no tensor '{prefix}{name}'; the nearest that it has is '{name}'" in message
    assert message.startswith(f"{COUNT} tensors are refused: ") and message.endswith(f"; and {COUNT - 3} more")
    assert message.count("nearest") == SHOWN


def test_the_same_of_fp8_pairs(large: WeightIndex, searches: Searches) -> None:
    """D1: the engine searched and dropped the nearest name of each weight, and searched one for the first scale."""
    metas = []
    for meta in large.metas().values():
        metas.append(TensorMeta(f"module.{meta.name}_scale_inv", torch.float32, (2, 1)))
        metas.append(TensorMeta(f"module.{meta.name}", torch.float8_e4m3fn, meta.shape))
    message = begin(large, metas)
    searches.require_few()
    name = next(iter(large.metas()))
    assert f"module.{name}_scale_inv has no matching weight: the model has no tensor 'module.{name}'" in message
    assert f"{2 * COUNT} tensors are refused" in message and message.count("nearest") == SHOWN


def test_names_that_are_like_none_have_no_hint(large: WeightIndex, searches: Searches) -> None:
    message = begin(large, [TensorMeta(f"{n}", torch.bfloat16, (1,)) for n in range(COUNT)])
    searches.require_few()
    assert "nearest" not in message


def test_a_name_may_be_of_any_length(large: WeightIndex, searches: Searches) -> None:
    """A comparison takes the square of the length: of the longest names none is made."""
    message = begin(large, [TensorMeta("x" * length, torch.bfloat16, (1,)) for length in (10_000_000, MAX_LENGTH + 1)])
    assert searches.compared == [] and len(message) < 700
    large.nearest("x" * MAX_LENGTH)
    assert searches.longest == MAX_LENGTH


class SearchingEach(WeightIndex):
    """Searches the nearest name of each tensor that is refused, as it did before D1."""

    def split(self, wire: TensorMeta) -> list[Piece]:
        self.nearest(wire.name)
        return super().split(wire)


@pytest.mark.mutant
def test_a_search_for_each_name_is_noticed(searches: Searches) -> None:
    begin(SearchingEach(Model(), {}), [TensorMeta(f"w{n}", torch.bfloat16, (1,)) for n in range(SHOWN + 1)])
    with pytest.raises(AssertionError):
        searches.require_few()


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", ["_NEIGHBOURS", "MAX_LENGTH"])
def test_a_search_without_a_bound_is_noticed(searches: Searches, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(unknown_names, wrong, 100_000)
    names = [f"layers.{n}.weight" for n in range(COMPARED + 1)]
    NearestName(names).of("x" * (MAX_LENGTH + 1) if wrong == "MAX_LENGTH" else "layers.w")
    with pytest.raises(AssertionError):
        searches.require_few()


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("model.language_model.layers.7.mlp.experts.3.up_proj.weight", "model.layers.7.mlp.experts.3.up_proj.weight"),
        ("model.layers.7.mlp.experts.3.up_proj.wieght", "model.layers.7.mlp.experts.3.up_proj.weight"),
        ("model.layer.7.mlp.experts.3.up_proj.weight", "model.layers.7.mlp.experts.3.up_proj.weight"),
        ("model.layers.7.mlp.expert.3.up_proj.weight", "model.layers.7.mlp.experts.3.up_proj.weight"),
        ("model.layers.7.moe.experts.3.up_proj.weight", "model.layers.7.mlp.experts.3.up_proj.weight"),
    ],
)
def test_a_name_that_is_nearly_right_is_known_again(large: WeightIndex, wrong: str, meant: str) -> None:
    assert large.nearest(wrong) == meant


def test_nothing_is_near_to_what_is_like_nothing() -> None:
    names = NearestName(["model.norm.weight", "lm_head.weight"])
    assert names.of("optimizer.state.3") is None and names.of("") is None
    assert names.of("module.model.norm.weight") == "model.norm.weight"
    assert NearestName([]).of("a") is None


def test_a_wrong_bucket_is_told_its_names_though_its_broadcast_fails() -> None:
    """D1: the trainer got a 502, as the wait for it was given up."""
    updater = new_updater_of_nothing()
    failure = TransportError("the wait for the sender ended early: ContinueGeneration came 10 s ago or earlier")
    bucket = [(f"module.w{number}", torch.zeros(2)) for number in range(30)]
    updater.begin("v2")
    with pytest.raises(UnknownTensorError, match=r"30 tensors are refused.* 'module.w0'"):
        updater.receive(LoopbackSource(bucket, failure))
    assert "module.w0" in updater.status()["failed"]


def new_updater_of_nothing() -> LoopbackUpdater:
    index = WeightIndex(Model(), {})
    return new_updater(index)


# --- one short message ------------------------------------------------------------------------------------------------


def test_one_message_for_each_kind_of_mistake(large: WeightIndex) -> None:
    """B11: the message has the number, the first name and what to do; a state dict in another dtype made 3 kB."""
    metas = list(large.metas().values())
    in_float32 = [TensorMeta(meta.name, torch.float32, meta.shape) for meta in metas]
    with pytest.raises(DtypeMismatchError) as refused:
        WeightTransaction(large, manifest=[(meta, None) for meta in in_float32])
    message = str(refused.value)
    assert message.startswith(f"{COUNT} tensors are refused: {metas[0].name}: the model has bfloat16, got float32; ")
    assert '"cast": true' in message and len(message) < 300
    mixed = [in_float32[0], TensorMeta(metas[1].name, torch.bfloat16, (1,)), TensorMeta("lost", torch.bfloat16, (1,))]
    with pytest.raises(WeightRequestError, match=r"got float32.*; .* has shape .*; the model has no tensor 'lost'"):
        WeightTransaction(large, "v", "partial", manifest=[(meta, None) for meta in mixed])
    with pytest.raises(ShapeMismatchError, match="; and 31101 more"):
        WeightTransaction(large, manifest=[(TensorMeta(meta.name, meta.dtype, (3,)), None) for meta in metas])


# --- what a model computes itself -------------------------------------------------------------------------------------

DERIVED: dict[str, torch.Tensor] = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    "model.rotary_emb.inv_freq": torch.ones(8),
    "rotary_emb.original_inv_freq": torch.ones(8),
    "module.model.layers.1.self_attn.rotary_emb.cos_cached": torch.ones(1, 1, 4, 8),
    "module.model.layers.1.self_attn.rotary_emb.sin_cached": torch.full((1, 1, 4, 8), torch.nan),
    "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
    "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
    "model.embeddings.position_ids": torch.arange(4),
}


@pytest.mark.parametrize("name", DERIVED)
def test_names_of_what_a_model_computes_itself(name: str) -> None:
    assert is_derived(name) and is_derived(f"any.prefix.{name}")


@pytest.mark.parametrize(
    "name", ["inv_freq.weight", "model.layers.0.self_attn.q_proj.bias", "xattn.bias", "attn.bias2", "my_inv_freqs", ""]
)
def test_other_names_are_refused_as_before(name: str) -> None:
    assert not is_derived(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "v1", "dense", seed=1)


@pytest.fixture(scope="module")
def with_derived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A newer version that holds all buffers, as a naive save writes it."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("models") / "v2", "dense", seed=2)
    (file,) = path.glob("*.safetensors")
    save_file(load_file(file) | DERIVED, file, {"format": "pt"})
    return path


def test_a_checkpoint_with_derived_tensors_starts(with_derived: Path) -> None:
    """B8: a cold start leaves them out."""
    weights = load_tiny(with_derived, torch.float32).weights
    assert not weights.metas().keys() & DERIVED.keys()
    (file,) = with_derived.glob("*.safetensors")
    norm = load_file(file)["model.norm.weight"]
    assert torch.equal(weights.places("model.norm.weight")[0].read(), norm)


def wrong_name(path: Path, tmp_path: Path) -> Path:
    copy = tiny_checkpoint(tmp_path / "wrong", "dense", seed=2)
    (file,) = copy.glob("*.safetensors")
    save_file(load_file(file) | {"model.rotary_emb.weight": torch.ones(8)}, file, {"format": "pt"})
    return copy


def test_a_checkpoint_with_any_other_name_does_not(with_derived: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"the model has no tensor 'model.rotary_emb.weight'"):
        load_tiny(wrong_name(with_derived, tmp_path), torch.float32)


@pytest.mark.parametrize("way", ["disk", "bucket", "manifest", "delta"])
def test_derived_tensors_are_taken_and_dropped_in_a_refresh(folder: Path, with_derived: Path, way: str) -> None:
    """B8: the same rule for every transport."""
    old, new = logical_tensors(folder), logical_tensors(with_derived)
    updater = new_updater(load_tiny(folder, torch.float32).weights)
    manifest: Any = None
    if way == "manifest":
        manifest = [(TensorMeta(n, t.dtype, tuple(t.shape)), fingerprint(t)) for n, t in new.items()]
    updater.begin("v2", manifest=manifest)
    named: Named = list(new.items())
    source: Any = LoopbackSource(named)
    if way == "disk":
        source = DiskSource(
            with_derived, updater.weights, complete=True, timeout_s=1.0, known_calls=updater.model.known_calls
        )
    if way == "delta":
        before = old | {name: torch.zeros_like(tensor) for name, tensor in DERIVED.items()}
        (payload,) = DeltaEncoder(before.items()).encode(named).payloads()
        frame = LoopbackSource([("delta", torch.frombuffer(bytearray(payload), dtype=torch.uint8))])
        source = DeltaSource(frame, updater.weights)
    updater.receive(source)
    assert updater.status()["missing"] == 0
    updater.verify()
    assert set(updater.commit().names) == old.keys()
    held = {name: updater.weights.places(name)[0].read() for name in updater.weights.metas()}
    assert all(torch.equal(held[name], new[name]) for name in old)
