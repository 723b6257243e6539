"""`lockstep eplb-plan` on dumps that a load recorder wrote: report, files, picture, and one line for an error."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks.eplb_heatmap import Panel, heatmap_svg
from benchmarks.eplb_plan import main
from eplb.algorithms.types import ExpertLayout, checked_map
from eplb.errors import EplbRequestError
from eplb.expert_location import trivial_location
from eplb.init_location import RecordedModel, load_location
from eplb.load_dump import LoadDump
from eplb.load_recorder import LoadRecorder
from eplb.placement import ExpertPlacement
from rollout.cli.main import main as lockstep

LAYERS, EXPERTS, RANKS, REDUNDANT = 3, 16, 4, 8
MODEL = RecordedModel("Qwen3MoeForCausalLM", (0, 1, 2), EXPERTS, num_experts_per_tok=2)
RANK_OPTIONS = ["--ranks", str(RANKS), "--redundant", str(REDUNDANT)]


@dataclass(frozen=True)
class Facts:
    weight_version: str = "1"
    weight_epoch: int = 1


@pytest.fixture(scope="module")
def dump() -> LoadDump:
    """Return the dump of a recorder after some passes with a few hot experts."""
    recorder = LoadRecorder(LAYERS, EXPERTS, ExpertPlacement(trivial_location(LAYERS, EXPERTS)))
    tokens = torch.zeros(300, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        scores = torch.rand(LAYERS, 300, EXPERTS, generator=generator) + torch.linspace(0, 1, EXPERTS) ** 3
        recorder.note(scores.topk(2).indices.transpose(0, 1), Facts(), tokens, tokens)
    return recorder.dump(MODEL.to_header())


@pytest.fixture
def dump_file(dump: LoadDump, tmp_path: Path) -> str:
    path = tmp_path / "dump.safetensors"
    path.write_bytes(dump.to_safetensors())
    return str(path)


def report_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, which must refuse, and return its one line on stderr."""
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("lockstep eplb-plan: ")
    return printed.err


def test_from_a_dump_to_a_plan_that_an_engine_takes_and_back(
    dump: LoadDump, dump_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, text_dump = str(tmp_path / "plan.json"), tmp_path / "dump.json"
    first = report_of([dump_file, *RANK_OPTIONS, "--output", plan], capsys)
    assert first["algorithm"] == "balanced" and "no placement is in force" in first["reason"]
    assert first["balancedness_before"] is None and first["copies"] == LAYERS * (EXPERTS + REDUNDANT)
    assert first["balancedness_after"]["least"] > 0.97 and first["duplicates_on_a_rank"] == 0
    located = load_location(plan, MODEL, REDUNDANT).physical_to_logical_map.numpy()
    layout = ExpertLayout(num_logical_experts=EXPERTS, num_physical_experts=EXPERTS + REDUNDANT, num_ranks=RANKS)
    checked_map(located, layout, LAYERS)
    with pytest.raises(EplbRequestError, match="another model"):
        load_location(plan, RecordedModel("Other", (0, 1, 2), EXPERTS, 2), REDUNDANT)

    text_dump.write_text(json.dumps(dump.to_json()))
    again = report_of([str(text_dump), *RANK_OPTIONS, "--current", plan], capsys)
    assert again["algorithm"] == "min_move" and again["copies"] == again["bytes"] == again["seconds"] == 0
    assert again["balancedness_before"]["mean"] == pytest.approx(first["balancedness_after"]["mean"])


def test_copies_bytes_and_time_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--synthetic", "zipf:1.0", "--layers", "2", "--experts", "32", "--ranks", "4", "--redundant", "4"]
    report = report_of([*options, "--drift", "0.8", "--expert-bytes", "1e9", "--bandwidth", "10"], capsys)
    assert report["algorithm"] == "min_move" and report["copies"] > 0
    assert report["bytes"] == report["copies"] * 1e9
    assert report["copied_share_of_slots"] == report["copies"] / (2 * 36)
    assert report["copies"] / 4 * 0.1 <= report["seconds"] <= report["copies"] * 0.1  # the busiest of four ranks
    assert report["balancedness_after"]["mean"] > report["balancedness_before"]["mean"]
    free = report_of([*options, "--drift", "0.8", "--refresh"], capsys)
    assert free["algorithm"] == "balanced" and "a full refresh writes every slot" in free["reason"]


def test_the_table_names_what_changes(dump_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lockstep(["eplb-plan", dump_file, *RANK_OPTIONS, "--algorithm", "deepseek"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "3 layers, 16 experts in 24 slots",
        "balancedness after",
        "copies between ranks",
        "72 (100.00%",
        "ms",
    ):
        assert words in printed


def test_the_picture_has_a_cell_for_each_rank_and_layer_in_its_colour(tmp_path: Path) -> None:
    picture = tmp_path / "loads.svg"
    options = ["--synthetic", "zipf:0.8", "--layers", "5", "--experts", "32", "--ranks", "8", "--redundant", "8"]
    assert main([*options, "--drift", "0.5", "--svg", str(picture), "--json"]) == 0
    root = ElementTree.fromstring(picture.read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "in force, even split" in texts and "min_move" in texts
    cells = [element.get("fill") for element in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(cells) == 1 + 2 * 5 * 8 + 5  # background, cells, legend

    labels = re.findall(r'text-anchor="(\w+)">(\d+)<', heatmap_svg([Panel("a", np.ones((20, 32)))]))
    numbers = {anchor: [int(text) for end, text in labels if end == anchor] for anchor in ("end", "middle")}
    assert numbers == {"end": list(range(0, 20, 3)), "middle": list(range(0, 32, 4))}, "layers and ranks (N42)"
    fills = re.findall(r'fill="(#[0-9a-f]{6})"/>', heatmap_svg([Panel("<a>", np.array([[0.2, 1.0, 1.8]]))]))
    assert fills[:3] == ["#2166ac", "#f7f7f7", "#b2182b"]  # cold, mean, hot


def with_file(tmp_path: Path, name: str, content: Any) -> str:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "5"], "16 slots cannot be divided evenly over 5 ranks"),
        (["--ranks", "4", "--redundant", "3"], "19 slots cannot be divided evenly over 4 ranks"),
        (["--ranks", "4", "--redundant", "-4"], "12 slots cannot hold 16 logical experts"),
        (["--ranks", "4", "--redundant", "64"], "each of 4 ranks needs at most one for each of 16 experts"),
        (["--ranks", "4", "--nodes", "3"], "4 ranks do not divide over 3 nodes"),
        (["--ranks", "4", "--groups", "5"], "16 logical experts do not divide into 5 groups"),
        (["--ranks", "4", "--algorithm", "best"], "unknown algorithm 'best'; choose from auto, min_move"),
        (["--ranks", "4", "--algorithm", "min_move"], "min_move needs the placement in force"),
        (["--ranks", "4", "--target", "2"], "above 0 and at most 1"),
        (["--ranks", "4", "--bandwidth", "0"], "must be more than 0"),
        (["--ranks", "4", "--synthetic", "zipf:1"], "either a file or --synthetic"),
        (["--ranks", "4", "--drift", "0.3"], "--drift needs --synthetic"),
        (["--ranks", "4", "--output", "/no/such/folder/plan.json"], "No such file or directory"),
    ],
)
def test_what_does_not_fit_is_one_line(
    dump_file: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal_of([dump_file, *options], capsys)


@pytest.mark.parametrize(
    ("current", "words"),
    [
        ([[*range(15), 0]] * 3, "layer 0: no slot holds expert 15"),
        ([[*range(15), 16]] * 3, "slot 15 holds expert 16; the model has 16"),
        ([[*range(16)]] * 2, "the map has the shape [2, 16], expected [3, 16]"),
        ([[*range(16), 0, 0, 1, 2]] * 3, "the map has the shape [3, 20], expected [3, 16]"),
        ([[float(expert) for expert in range(16)]] * 3, "the map must hold integers"),
        ("abc", "is not an array of numbers"),
    ],
)
def test_a_map_that_cannot_be_served_is_one_line(
    dump_file: str, tmp_path: Path, current: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = with_file(tmp_path, "map.json", {"physical_to_logical_map": current})
    assert words in refusal_of([dump_file, "--ranks", "4", "--current", file], capsys)


def test_an_expert_twice_on_a_rank_is_refused_by_name_and_mended_by_auto(
    dump_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = with_file(tmp_path, "map.json", {"physical_to_logical_map": [[0, 0, 1, 2, *range(3, 16), 1, 2, 3]] * 3})
    options = [dump_file, "--ranks", "4", "--redundant", "4", "--current", twice]
    assert "layer 0: rank 0 holds expert 0 twice" in refusal_of([*options, "--algorithm", "min_move"], capsys)
    report = report_of(options, capsys)
    assert report["algorithm"] == "balanced" and "twice on rank 0 of layer 0" in report["reason"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("dump.json", {"counts": [[1]]}, "has no logical_count"),
        ("dump.json", "[1, 2]", "has no logical_count"),
        ("dump.json", "{", "cannot be read"),
        ("dump.json", {"logical_count": [[1, 2], [3]]}, "cannot be read"),
        ("dump.json", {"logical_count": [1, 2]}, "wanted [layers, experts]"),
        ("dump.json", {"logical_count": [["a", "b"]]}, "is not an array of numbers"),
        ("dump.json", {"logical_count": [[1, -2, 3, 4]]}, "must be finite and not negative"),
        ("dump.safetensors", "not one", "cannot be read"),
    ],
)
def test_a_dump_that_cannot_be_read_is_one_line(
    tmp_path: Path, name: str, content: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal_of([with_file(tmp_path, name, content), "--ranks", "2"], capsys)


def test_a_dump_of_another_model_is_one_line(
    dump_file: str, dump: LoadDump, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"physical_to_logical_map": [list(range(EXPERTS))] * LAYERS, "model": dump.header["model"]}
    assert main([dump_file, "--ranks", "4", "--current", with_file(tmp_path, "same.json", content), "--json"]) == 0
    capsys.readouterr()
    content["model"] = content["model"] | {"architecture": "DeepseekV3ForCausalLM"}
    other = with_file(tmp_path, "other.json", content)
    line = refusal_of([dump_file, "--ranks", "4", "--current", other], capsys)
    assert "come from different models" in line and "DeepseekV3ForCausalLM" in line
    assert "No such file" in refusal_of(["/no/dump.json", "--ranks", "4"], capsys)
