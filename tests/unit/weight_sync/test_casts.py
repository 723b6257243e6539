"""Dtypes of sent tensors: which are widened, which are cast on request, and which are refused.

Fingerprints and digests are of the tensors as sent.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from tests.family_zoo import family_checkpoint
from tests.kernels import native_ops
from tests.logical_weights_fake import EMBED, NORM, FakeWeights, version
from tests.loopback_refresh import LoopbackTrainer
from tests.loopback_updater import LoopbackSource, LoopbackUpdater
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from weight_sync.errors import ContentError, DtypeMismatchError
from weight_sync.fingerprint import digest, fingerprint, fingerprint_hex
from weight_sync.held_format import INT8_BLOCKS
from weight_sync.tensor_meta import TensorMeta, dtype_name

Tensors = dict[str, torch.Tensor]
BIAS = "mlp.gate.e_score_correction_bias"
SIGMOID_FAMILIES = ("glm4_moe", "deepseek_v3")


def digest_of(tensors: Tensors) -> str:
    return digest((TensorMeta(n, t.dtype, tuple(t.shape)), fingerprint(t)) for n, t in tensors.items())


def manifest_of(tensors: Tensors) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "fingerprint": fingerprint_hex(fingerprint(tensor)),
        }
        for name, tensor in tensors.items()
    ]


# --- one transaction --------------------------------------------------------------------------------------------------


def updater(cast: bool = False, **settings: Any) -> LoopbackUpdater:
    return LoopbackUpdater(FakeWeights(), device="cpu", timeout_s=1.0, vote=lambda mine: mine, cast=cast, **settings)


def commit(updater: LoopbackUpdater, sent: Tensors, **begin: Any) -> Any:
    manifest = [(TensorMeta(n, t.dtype, tuple(t.shape)), fingerprint(t)) for n, t in sent.items()]
    updater.begin("v2", manifest=manifest, **begin)
    updater.send(list(sent.items()))
    updater.verify()
    return updater.commit()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_loses_nothing_is_always_taken(dtype: torch.dtype) -> None:
    """D3: a norm held in float32; what was sent is what was announced, and what the digest is of."""
    sent = version(3) | {NORM: version(3)[NORM].to(dtype)}
    receiver = updater()
    result = commit(receiver, sent)
    assert torch.equal(receiver.weights.norm, sent[NORM].float())  # type: ignore[attr-defined]
    assert result.digests.sent == digest_of(sent)
    assert result.digests.held == digest_of(sent | {NORM: sent[NORM].float()}) != result.digests.sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("asked", ["by the update", "by the call", "by the server"])
def test_what_loses_something_is_cast_where_it_is_asked_for(dtype: torch.dtype, asked: str) -> None:
    """B11: without a request the tensors are refused."""
    sent = version(3) | {EMBED: torch.randn(6, 4).to(dtype)}
    refusing = updater()
    refusing.begin("v2")
    with pytest.raises(DtypeMismatchError, match=f'{EMBED}: the model has bfloat16, got .*"cast": true'):
        refusing.send(list(sent.items()))
    receiver = updater(cast=asked == "by the server")
    receiver.begin("v2", cast=True if asked == "by the update" else None)
    receiver.receive(LoopbackSource(list(sent.items())), cast=True if asked == "by the call" else None)
    receiver.verify()
    result = receiver.commit()
    assert torch.equal(receiver.weights.embed, sent[EMBED].to(torch.bfloat16))  # type: ignore[attr-defined]
    assert result.digests.sent == digest_of(sent)
    assert result.digests.held == digest_of(sent | {EMBED: sent[EMBED].to(torch.bfloat16)})


def test_a_manifest_says_in_which_dtype_a_tensor_comes() -> None:
    sent = version(3) | {EMBED: torch.randn(6, 4)}
    with pytest.raises(DtypeMismatchError, match="got float32"):
        commit(updater(), sent)
    receiver = updater()
    assert commit(receiver, sent, cast=True).digests.sent == digest_of(sent)
    assert torch.equal(receiver.weights.embed, sent[EMBED].to(torch.bfloat16))  # type: ignore[attr-defined]


def test_an_update_may_say_no_where_the_server_says_yes() -> None:
    receiver = updater(cast=True)
    receiver.begin("v2", cast=False)
    with pytest.raises(DtypeMismatchError):
        receiver.send([(EMBED, torch.randn(6, 4))])


@pytest.mark.parametrize(("value", "dtype"), [(3.4e38, torch.bfloat16), (1e6, torch.float16)])
def test_values_beyond_the_models_dtype_are_refused(value: float, dtype: torch.dtype) -> None:
    """Otherwise infinity would be served in their place."""
    receiver = LoopbackUpdater(FakeWeights(dtype=dtype), device="cpu", timeout_s=1.0, vote=lambda mine: mine)
    receiver.begin("v2", cast=True)
    with pytest.raises(ContentError, match=f"{EMBED} has values outside the range of {dtype_name(dtype)}"):
        receiver.send([(EMBED, torch.full((6, 4), value))])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float8_e5m2, torch.bool])
def test_what_is_no_float_is_never_cast(dtype: torch.dtype) -> None:
    receiver = updater(cast=True)
    receiver.begin("v2")
    with pytest.raises(DtypeMismatchError, match=f"{EMBED}: the model has bfloat16, got {dtype_name(dtype)}$"):
        receiver.send([(EMBED, torch.ones(6, 4).to(dtype))])


def test_what_is_cast_is_quantised_then() -> None:
    """The eight bits are made of values in the model's dtype, as at start."""
    native_ops()  # plain torch does not know them
    sent = version(3) | {EMBED: torch.randn(6, 4)}
    receiver = updater(cast=True, quantised={EMBED: INT8_BLOCKS})
    commit(receiver, sent)
    expected = INT8_BLOCKS.values(sent[EMBED].to(torch.bfloat16))
    assert torch.equal(receiver.weights.embed, expected)  # type: ignore[attr-defined]
    assert receiver.model.content.digests.sent == digest_of(sent)


# --- a scheduler ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / f"v{seed}", "dense", seed=seed, dtype="bfloat16") for seed in (1, 2)]


@pytest.fixture
def harness(folders: list[Path]) -> Harness:
    return Harness(folders[0], dtype="bfloat16", weight_version="v1", enable_return_routed_experts=False)


def held(harness: Harness) -> Tensors:
    weights = harness.scheduler.runner.state.model.weights
    return {name: weights.places(name)[0].read() for name in weights.metas()}


def in_float32(folder: Path) -> Tensors:
    """Return the newer version as a trainer's master weights in float32, whose values bfloat16 cannot hold."""
    return {name: tensor.float() * 1.001 for name, tensor in logical_tensors(folder).items()}


Send = Callable[..., Any]


def by_broadcast(harness: Harness, sent: Tensors, **fields: Any) -> Any:
    shapes = [list(tensor.shape) for tensor in sent.values()]
    lists = {"names": list(sent), "dtypes": [dtype_name(t.dtype) for t in sent.values()], "shapes": shapes}
    return harness.control(UpdateWeightsFromDistributedReqInput, **lists, **fields)


def in_the_body(harness: Harness, sent: Tensors, **fields: Any) -> Any:
    return harness.control(
        UpdateWeightsFromTensorReqInput, payload=bytearray(save(sent)), format="safetensors", **fields
    )


@pytest.mark.parametrize("send", [by_broadcast, in_the_body])
@pytest.mark.parametrize("client", ["begin", "call of its own", "paused"])
def test_a_cast_is_asked_for_on_every_transport(
    harness: Harness, folders: list[Path], monkeypatch: pytest.MonkeyPatch, send: Send, client: str
) -> None:
    """B11: `cast` of a begin holds for all calls of the update, and `cast` of a call for that call."""
    sent = in_float32(folders[1])
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, LoopbackTrainer(sent).source)
    refused = send(harness, sent)
    assert refused.status_code == 400 and '"cast": true' in refused.message and len(refused.message) < 300
    assert refused.message.startswith(f"{len(sent)} tensors are refused: ")
    if client == "begin":
        begun = harness.control(BeginWeightUpdateReqInput, update_id="a", manifest=manifest_of(sent), cast=True)
        assert begun.success, begun.message
        assert send(harness, sent, update_id="a").success
        assert harness.control(EndWeightUpdateReqInput, update_id="a").success
    elif client == "paused":
        assert harness.control(PauseGenerationReqInput, mode="in_place").success
        assert send(harness, sent, cast=True).success
        assert harness.control(ContinueGenerationReqInput).success
    else:
        answer = send(harness, sent, cast=True)
        assert answer.success, answer.message
    now = held(harness)
    assert all(torch.equal(now[name], sent[name].to(torch.bfloat16)) for name in now)
    assert harness.scheduler.runner.state.epoch.content_digest == digest_of(sent)
    assert harness.control(WeightsCheckerReqInput).data["digest"] == digest_of(sent)


def test_a_flag_casts_for_clients_that_cannot_ask(folders: list[Path]) -> None:
    """B11: SGLang's and vLLM's clients have no field for it."""
    harness = Harness(folders[0], dtype="bfloat16", cast_weight_updates=True, enable_return_routed_experts=False)
    sent = in_float32(folders[1])
    assert in_the_body(harness, sent).success
    assert torch.equal(held(harness)["model.norm.weight"], sent["model.norm.weight"].to(torch.bfloat16))
    refused = in_the_body(harness, sent, cast=False)
    assert refused.status_code == 400


def test_a_folder_is_cast_as_at_start(harness: Harness, folders: list[Path], tmp_path: Path) -> None:
    """It is cast also in an update whose manifest states fingerprints of the folder's own tensors."""
    sent = in_float32(folders[1])
    folder = tiny_checkpoint(tmp_path / "float32", "dense", seed=2, dtype="float32")
    (file,) = folder.glob("*.safetensors")
    assert load_file(file).keys() == sent.keys()
    save_file(sent, file, {"format": "pt"})
    begun = harness.control(BeginWeightUpdateReqInput, update_id="a", manifest=manifest_of(sent), cast=True)
    assert begun.success, begun.message
    bucket = harness.control(UpdateWeightsFromDiskReqInput, update_id="a", model_path=str(folder))
    assert bucket.success, bucket.message
    assert harness.control(AbortWeightUpdateReqInput, update_id="a").success
    assert harness.control(UpdateWeightsFromDiskReqInput, model_path=str(folder)).success
    started = Harness(folder, dtype="bfloat16", enable_return_routed_experts=False)
    now, fresh = held(harness), held(started)
    assert all(torch.equal(now[name], fresh[name]) for name in now)


@pytest.mark.parametrize("family", SIGMOID_FAMILIES)
def test_a_trainer_that_casts_everything_refreshes_sigmoid_routers(family: str, tmp_path: Path) -> None:
    """D3: the correction bias is held in float32, and comes in bfloat16."""
    folder = family_checkpoint(tmp_path / "v1", family, 1, torch.bfloat16)
    harness = Harness(folder, dtype="bfloat16", weight_version="v1")
    sent = {name: (tensor * 1.5).to(torch.bfloat16) for name, tensor in logical_tensors(folder).items()}
    begun = harness.control(BeginWeightUpdateReqInput, weight_version="v2", manifest=manifest_of(sent))
    assert begun.success, begun.message
    answer = in_the_body(harness, sent)
    assert answer.success, answer.message
    ended = harness.control(EndWeightUpdateReqInput)
    assert ended.success and ended.data["content_digest"] == digest_of(sent)
    biases = [name for name in sent if name.endswith(BIAS)]
    assert biases and all(torch.equal(held(harness)[name], sent[name].float()) for name in biases)
