"""`--init-expert-location`: the values that are taken, and the one line that refuses others."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb.errors import EplbRequestError, LayoutError, LoadsError, MapError
from eplb.expert_location import trivial_location
from eplb.init_location import RecordedModel, load_location
from eplb.load_recorder import LoadRecorder
from eplb.placement import ExpertPlacement

MODEL = RecordedModel("Qwen3MoeForCausalLM", (1, 3), num_experts=4, num_experts_per_tok=2)
MAP = [[3, 2, 1, 0, 3], [0, 1, 2, 3, 0]]
COUNTS = [[1, 9, 1, 1], [5, 5, 5, 30]]


def rows(source: str, redundant: int = 1) -> list[list[int]]:
    return load_location(source, MODEL, redundant).physical_to_logical_map.tolist()


def test_trivial_repeats_the_experts_in_order() -> None:
    assert rows("trivial", 0) == [[0, 1, 2, 3]] * 2
    assert rows("trivial", 6) == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]] * 2


def test_a_map_is_taken_as_it_is(tmp_path: Path) -> None:
    assert rows(json.dumps({"physical_to_logical_map": MAP, "placement_epoch": 3})) == MAP
    (tmp_path / "map.json").write_text(json.dumps({"physical_to_logical_map": MAP}))
    assert rows(str(tmp_path / "map.json")) == MAP
    torch.save({"physical_to_logical_map": torch.tensor(MAP, dtype=torch.int32)}, tmp_path / "map.pt")
    assert rows(str(tmp_path / "map.pt")) == MAP


def test_counts_give_slots_to_the_busiest(tmp_path: Path) -> None:
    assert rows(json.dumps({"logical_count": COUNTS}), 2) == [[0, 1, 2, 3, 1, 1], [0, 1, 2, 3, 3, 3]]
    by_step = np.stack([COUNTS, np.zeros((2, 4), dtype=int)])
    torch.save({"logical_count": torch.from_numpy(by_step)}, tmp_path / "counts.pt")
    assert rows(str(tmp_path / "counts.pt"), 2) == [[0, 1, 2, 3, 1, 1], [0, 1, 2, 3, 3, 3]]
    assert rows(json.dumps({"logical_count": [[0, 0, 0, 0], [0, 0, 0, 0]]}), 4) == [[0, 1, 2, 3] * 2] * 2


def test_a_dump_is_taken(tmp_path: Path) -> None:
    recorder = LoadRecorder(2, 4, ExpertPlacement(trivial_location(2, 4)))
    ids = torch.tensor([[[2, 0], [3, 0]], [[2, 1], [3, 0]]])

    class Facts:
        weight_version, weight_epoch = "v", 0

    recorder.note(ids, Facts(), ids[:, 0, 0], ids[:, 0, 0])
    dump = recorder.dump(MODEL.to_header())
    (tmp_path / "dump.safetensors").write_bytes(dump.to_safetensors())
    (tmp_path / "dump.json").write_text(json.dumps(dump.to_json()))
    for name in ("dump.safetensors", "dump.json"):
        assert rows(str(tmp_path / name)) == [[0, 1, 2, 3, 2], [0, 1, 2, 3, 0]]
        other = RecordedModel("Qwen3MoeForCausalLM", (1, 3), 4, num_experts_per_tok=4)
        with pytest.raises(EplbRequestError, match="another model: its num_experts_per_tok is 2, expected 4"):
            load_location(str(tmp_path / name), other, 1)


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        ({}, EplbRequestError, "either physical_to_logical_map or logical_count"),
        (
            {"physical_to_logical_map": MAP, "logical_count": COUNTS},
            EplbRequestError,
            "either physical_to_logical_map or logical_count",
        ),
        ({"physical_to_logical_map": [[0, 1, 2, 3]] * 2}, MapError, r"shape \[2, 4\].*need \[2, 5\]"),
        ({"physical_to_logical_map": MAP[:1]}, MapError, r"shape \[1, 5\]"),
        ({"physical_to_logical_map": [[0, 1, 2, 3, 3], [0, 1, 2, 2, 2]]}, MapError, "layer 1: no slot holds expert 3"),
        ({"physical_to_logical_map": [[0, 1, 2, 3, 4], MAP[1]]}, MapError, "layer 0: slot 4 holds expert 4"),
        ({"physical_to_logical_map": [[0, 1, 2, 3, -1], MAP[1]]}, MapError, "layer 0: slot 4 holds expert -1"),
        ({"physical_to_logical_map": [[0.0, 1, 2, 3, 3], MAP[1]]}, MapError, "must hold integers, got float64"),
        ({"physical_to_logical_map": [[0], [1, 2]]}, MapError, "not an array"),
        ({"physical_to_logical_map": "abc"}, MapError, "shape"),
        ({"logical_count": [[1, 2, 3]] * 2}, LoadsError, r"shape \[2, 3\].*needs \[2, 4\]"),
        ({"logical_count": [[1, 2, 3, -1]] * 2}, LoadsError, "not negative"),
        ({"logical_count": [[1, 2, 3, 1e999]] * 2}, LoadsError, "finite"),
        ({"logical_count": [["a", 2, 3, 4]] * 2}, LoadsError, "numbers"),
        ({"logical_count": None}, LoadsError, "shape"),
        ({"logical_count": COUNTS, "model": {"num_experts": 64}}, EplbRequestError, "another model"),
    ],
)
def test_what_does_not_fit_is_one_line(content: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        rows(json.dumps(content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "{'a': 1}", "no_such_file.json", "", "/", "[" * 5])
def test_what_cannot_be_read_is_one_line(text: str) -> None:
    with pytest.raises(EplbRequestError) as caught:
        rows(text)
    assert "\n" not in str(caught.value)


def test_negative_redundancy_is_refused() -> None:
    with pytest.raises(LayoutError):
        rows("trivial", -1)


class RunsACommand:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["location.pt", "location.json", "location.safetensors"])
def test_no_file_runs_anything(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    evil = pickle.dumps({"physical_to_logical_map": RunsACommand(marker)})
    torch.save({"physical_to_logical_map": RunsACommand(marker)}, tmp_path / "evil.pt")
    for content in (evil, (tmp_path / "evil.pt").read_bytes()):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(EplbRequestError) as caught:
            rows(str(tmp_path / name))
        assert "\n" not in str(caught.value) and not marker.exists()
    pickle.loads(evil)  # noqa: S301 - the file would have, if it could
    assert marker.exists()


@pytest.mark.parametrize("suffix", [".pt", ".json", ".safetensors"])
def test_damaged_files_are_one_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    torch.save([1, 2], tmp_path / "list.pt")
    for content in (b"", b"\x00" * 40, b"\xff\xfe", b"[1]", (tmp_path / "list.pt").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(EplbRequestError):
            rows(str(path))
