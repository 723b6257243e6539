"""Refreshes from disk in a real scheduler: weights, version and path, and everything that is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    GetStateReqInput,
    PauseGenerationReqInput,
)
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    PullWeightsReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    WeightsCheckerReqInput,
)
from tests.late_loop import loop  # noqa: F401
from tests.loopback_refresh import LoopbackTrainer
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from weight_sync.delta.byte_patches import ENCODERS
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.publisher import publish_bytes, publish_encoded
from weight_sync.fingerprint import fingerprint, fingerprint_hex

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    base = tmp_path_factory.mktemp("models")
    return tiny_checkpoint(base / "old", "moe_dense_first", seed=1), tiny_checkpoint(
        base / "new", "moe_dense_first", seed=2
    )


@pytest.fixture
def harness(folders: tuple[Path, Path]) -> Harness:
    return Harness(folders[0], weight_version="v1")


def state(harness: Harness) -> dict:
    return harness.control(GetStateReqInput).data


def from_disk(harness: Harness, folder: Path, **fields: object) -> ControlReqOutput:
    return harness.control(UpdateWeightsFromDiskReqInput, model_path=str(folder), **fields)


def holds(harness: Harness, tensors: Mapping[str, torch.Tensor]) -> bool:
    stated = {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in tensors.items()}
    return harness.control(WeightsCheckerReqInput).data["checksums"] == stated


def drifted(tensors: Tensors, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + 1e-4 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}


def test_a_checkpoint_is_a_refresh_of_its_own(harness: Harness, folders: tuple[Path, Path]) -> None:
    assert state(harness)["weights_path"] is None
    answer = from_disk(harness, folders[1], weight_version="v2")
    assert answer.success, answer.message
    assert answer.data["weight_version"] == state(harness)["weight_version"] == "v2"
    assert answer.data["model_path"] == state(harness)["weights_path"] == str(folders[1])
    assert answer.data["num_paused_requests"] == 0
    assert holds(harness, logical_tensors(folders[1]))
    assert from_disk(harness, folders[0]).data["weight_version"] == "v2+1"


def test_while_paused_it_takes_effect_at_once(harness: Harness, folders: tuple[Path, Path]) -> None:
    """slime asks for the version before it continues."""
    harness.submit(PROMPT, params={"max_new_tokens": 30})
    harness.tick()
    harness.control(PauseGenerationReqInput, mode="retract")
    answer = from_disk(harness, folders[1], weight_version="7")
    assert answer.success, answer.message
    assert answer.data["num_paused_requests"] == 1
    assert state(harness)["weight_version"] == "7"
    assert state(harness)["paused"]
    assert harness.control(ContinueGenerationReqInput).success
    harness.run()


def damaged(folder: Path, source: Path, kind: str) -> Path:
    shutil.copytree(source, folder)
    file = sorted(folder.glob("*.safetensors"))[0]
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-7])
    elif kind == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    elif kind == "missing":
        tensors = load_file(file)
        tensors.pop("model.norm.weight")
        save_file(tensors, file)
    elif kind == "nan":
        tensors = load_file(file)
        tensors["model.norm.weight"][3] = torch.nan
        save_file(tensors, file)
    elif kind == "gone":
        shutil.rmtree(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("truncated", 400, "its header describes"),
        ("config", 400, "rotary.theta 5.0"),
        ("missing", 400, "tensors missing"),
        ("nan", 400, "not finite"),
        ("gone", 400, "not a folder"),
    ],
)
def test_a_failure_keeps_weights_version_and_path(
    harness: Harness, folders: tuple[Path, Path], tmp_path: Path, kind: str, status: int, reason: str
) -> None:
    assert from_disk(harness, folders[0], weight_version="v2").success
    before = state(harness)
    answer = from_disk(harness, damaged(tmp_path / "bad", folders[1], kind), weight_version="v3")
    assert (answer.success, answer.status_code) == (False, status), answer.message
    assert reason in answer.message
    after = state(harness)
    assert [after[key] for key in ("weight_version", "weight_epoch", "weights_path")] == [
        before[key] for key in ("weight_version", "weight_epoch", "weights_path")
    ]
    assert holds(harness, logical_tensors(folders[0]))
    assert not after["weight_update"]["open"]
    assert from_disk(harness, folders[1], weight_version="v3").success


def test_inside_a_begun_update_it_is_a_bucket(
    harness: Harness, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = logical_tensors(folders[1])
    part, rest = tmp_path / "part", dict(new)
    part.mkdir()
    save_file({name: rest.pop(name) for name in sorted(new)[:10]}, part / "model.safetensors")
    trainer = LoopbackTrainer(rest)
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    assert harness.control(BeginWeightUpdateReqInput, weight_version="v2").success
    answer = from_disk(harness, part)
    assert answer.success, answer.message
    assert state(harness)["weight_version"] == "v1"
    assert trainer.send(harness).success
    assert harness.control(EndWeightUpdateReqInput).success
    assert holds(harness, new)
    assert state(harness)["weights_path"] is None, "these weights are not that folder's"


def test_buckets_that_wait_to_be_settled_are_not_swept_away(
    harness: Harness, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = logical_tensors(folders[1])
    trainer = LoopbackTrainer(new)
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    harness.control(PauseGenerationReqInput)
    assert trainer.send(harness).success
    assert from_disk(harness, folders[0]).status_code == 409
    assert harness.control(ContinueGenerationReqInput).success
    assert holds(harness, new)


def test_paths_that_are_none_are_refused_and_nothing_hangs(
    harness: Harness, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = damaged(tmp_path / "piped", folders[1], "none")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    for path in (folder, Path("/" + "x" * 5000), Path("a\0b"), folders[1] / "config.json"):
        answer = from_disk(harness, path)
        assert (answer.success, answer.status_code) == (False, 400), answer.message
        pulled = harness.control(
            PullWeightsReqInput, local_checkpoint_dir=str(path), source_dir=str(tmp_path), target_version=0
        )
        assert not pulled.success
        assert "Traceback" not in pulled.message
    assert state(harness)["weight_version"] == "v1"


def test_other_load_formats_are_refused(harness: Harness, folders: tuple[Path, Path]) -> None:
    answer = from_disk(harness, folders[1], load_format="dummy")
    assert answer.status_code == 400
    assert "'dummy'" in answer.message


class Published:
    """Versions of the engine's own checkpoint, published as they are made."""

    def __init__(self, root: Path, base: Path) -> None:
        self.source, self.local = root / "source", root / "local"
        self.versions = [logical_tensors(base)]
        self._encoder = DeltaEncoder(self.versions[0].items())

    def publish(self, encoding: str) -> int:
        old, number = self.versions[-1], len(self.versions)
        new = drifted(old, number)
        delta = self._encoder.encode(new.items())
        if encoding in ENCODERS:
            publish_bytes(self.source, number, old, new, encoding=encoding)
        else:
            publish_encoded(self.source, number, delta)
        self._encoder.advance(delta)
        self.versions.append(new)
        return number

    def pull(self, harness: Harness, target: int, **fields: object) -> ControlReqOutput:
        return harness.control(
            PullWeightsReqInput,
            local_checkpoint_dir=str(self.local),
            source_dir=str(self.source),
            target_version=target,
            **fields,
        )


@pytest.fixture
def published(tmp_path: Path, folders: tuple[Path, Path]) -> Published:
    return Published(tmp_path, folders[0])


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "ulp-gap"])
def test_slimes_round_pull_then_load(harness: Harness, published: Published, encoding: str) -> None:
    assert published.pull(harness, 0).success
    for _ in range(2):
        target = published.publish(encoding)
        answer = published.pull(harness, target)
        assert answer.success, answer.message
        assert answer.data["memory"] is None
        assert holds(harness, published.versions[target - 1]), "a pull by itself changes nothing that serves"
        harness.control(PauseGenerationReqInput)
        assert from_disk(harness, published.local, weight_version=str(target)).success
        assert state(harness)["weight_version"] == str(target)
        assert harness.control(ContinueGenerationReqInput).success
        assert holds(harness, published.versions[target])


def test_memory_follows_by_the_same_deltas(harness: Harness, published: Published) -> None:
    published.publish("xor")
    answer = published.pull(harness, 1, update_memory=True)
    assert answer.success, answer.message
    assert (answer.data["memory"], answer.data["weight_version"]) == ("delta", "1")
    assert holds(harness, published.versions[1])
    for encoding in ("ulp-gap", "overwrite", "xor"):
        published.publish(encoding)
    answer = published.pull(harness, 4, update_memory=True, weight_version="four")
    assert (answer.data["memory"], answer.data["weight_version"]) == ("delta", "four")
    assert holds(harness, published.versions[4])
    again = published.pull(harness, 4, update_memory=True)
    assert (again.success, again.data["memory"]) == (True, "unchanged")


def test_memory_of_another_origin_is_loaded_whole(
    harness: Harness, published: Published, folders: tuple[Path, Path]
) -> None:
    published.publish("xor")
    assert from_disk(harness, folders[1]).success
    answer = published.pull(harness, 1, update_memory=True)
    assert answer.data["memory"] == "full"
    assert holds(harness, published.versions[1])
    published.publish("xor")
    assert published.pull(harness, 2).success
    assert published.pull(harness, 2, update_memory=True).data["memory"] == "delta", "the folder was ahead of memory"
    assert holds(harness, published.versions[2])
    assert published.pull(harness, 0, update_memory=True).data["memory"] == "full"
    assert holds(harness, published.versions[0])


def test_a_loaded_folder_is_where_memory_goes_on_from(harness: Harness, published: Published) -> None:
    published.publish("xor")
    assert published.pull(harness, 1).success
    assert from_disk(harness, published.local).success
    published.publish("xor")
    assert published.pull(harness, 2, update_memory=True).data["memory"] == "delta"
    assert holds(harness, published.versions[2])


def test_a_folder_for_the_draft_alone_says_nothing_of_the_model(
    folders: tuple[Path, Path], published: Published
) -> None:
    """Else the next pull would take the model for that version, and leave it as it is."""
    drafts = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folders[0])}
    harness = Harness(folders[0], weight_version="v1", skip_tokenizer_init=True, context_length=128, **drafts)
    published.publish("overwrite")
    assert published.pull(harness, 1).success
    loaded = from_disk(harness, published.local, selector="draft")
    assert loaded.success and loaded.data["draft"]["came"] == "alone", loaded.message
    assert state(harness)["weights_path"] is None and holds(harness, published.versions[0])
    answer = published.pull(harness, 1, update_memory=True)
    assert answer.data["memory"] == "delta" and holds(harness, published.versions[1])


def test_a_folder_is_loaded_at_the_version_that_is_asked_for(
    harness: Harness, folders: tuple[Path, Path], published: Published
) -> None:
    target = published.publish("xor")
    assert published.pull(harness, target).success
    for folder, version, found in ((published.local, target + 1, target), (folders[0], target, None)):
        answer = from_disk(harness, folder, pulled_version=version)
        assert answer.status_code == 409 and f"is at version {found}, not {version}" in answer.message, answer.message
    assert holds(harness, published.versions[0])
    assert from_disk(harness, published.local, pulled_version=target).success
    assert holds(harness, published.versions[target])


def test_a_refused_pull_changes_neither(harness: Harness, published: Published) -> None:
    target = published.publish("xor")
    assert published.pull(harness, target, update_memory=True).success
    published.publish("xor")
    file = sorted((published.source / "weight_v000002").glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    answer = published.pull(harness, 2, update_memory=True)
    assert answer.status_code == 400, answer.message
    assert holds(harness, published.versions[1])
    assert state(harness)["weight_version"] == "1"
    assert published.pull(harness, 3, update_memory=True).status_code == 400
    assert "missing" in published.pull(harness, 3).message


def test_an_open_update_is_not_disturbed_by_a_pull(harness: Harness, published: Published) -> None:
    published.publish("xor")
    assert harness.control(BeginWeightUpdateReqInput).success
    assert published.pull(harness, 1, update_memory=True).status_code == 409
    assert published.pull(harness, 1).success
    assert harness.control(AbortWeightUpdateReqInput).success
