"""The scaling benchmark: prompts that are found and not computed, points that do not fit, the picture."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import line_chart, scaling, shapes
from benchmarks.floor import Machine, decode_step_floor_s
from rollout.server.engine import Engine
from tests.model_zoo import tiny_checkpoint, tiny_spec

pytestmark = pytest.mark.full

POINTS = [scaling.Point(batch, context, 8) for context in (10, 40) for batch in (2, 5)]
SVG = "{http://www.w3.org/2000/svg}"
MACHINE = Machine(read_bytes_per_s=1e10, bf16_flops_per_s=1e12, fp32_flops_per_s=1e12)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("scaling") / "model", "moe")
    slots = max(point.slots for point in POINTS)
    engine = Engine(model_path=str(folder), skip_tokenizer_init=True, max_total_tokens=slots)
    scaling._fill(engine.scheduler.runner.kv_pool)
    return engine


def test_prompts_are_found_in_the_cache(engine: Engine) -> None:
    prompts = [[1, 5, 5, 5, 5], [2, 5, 5, 5, 5]]
    scaling._cache_prompts(engine, prompts)
    outputs = engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    assert [output["meta_info"]["cached_tokens"] for output in outputs] == [4, 4]  # type: ignore[index]


def test_prompts_that_begin_alike_are_refused(engine: Engine) -> None:
    with pytest.raises(AssertionError, match="begin alike"):
        scaling._cache_prompts(engine, [[7, 5, 5], [7, 6, 6]])


def test_every_point_is_measured(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "moe")
    engine = Engine(
        model_path=str(folder), skip_tokenizer_init=True, max_total_tokens=max(point.slots for point in POINTS)
    )
    scaling._fill(engine.scheduler.runner.kv_pool)
    seconds = scaling._measure(engine, POINTS, 1, 320)
    assert set(seconds) == set(POINTS) and all(value > 0 for value in seconds.values())


def test_what_does_not_fit_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "CACHE", tmp_path)
    monkeypatch.setitem(scaling.SHAPES, "S", tiny_spec("moe", dtype="bfloat16"))
    monkeypatch.setattr(scaling, "LAYERS", 2)
    monkeypatch.setattr(scaling, "available_memory_bytes", lambda: 4_000_000)
    small, large = scaling.Point(2, 10, 8), scaling.Point(64, 8000, 8)
    rows = scaling._measure_model("S", 8, [small, large], 1)
    assert rows[0]["tokens_per_s"] > 0
    assert re.fullmatch(r"needs 0\.\d GB, 0\.0 were free", rows[1]["not measured"])
    beside = scaling._beside_floor(rows[1], MACHINE)
    assert beside["floor_tokens_per_s"] > 0 and "floor_share" not in beside


def test_floor_falls_with_context_and_with_experts() -> None:
    spec = tiny_spec("moe")
    base = decode_step_floor_s(spec, 8, 128, MACHINE)
    assert decode_step_floor_s(spec, 8, 8192, MACHINE) > base
    assert decode_step_floor_s(dataclasses.replace(spec, experts=64), 8, 128, MACHINE) > base
    assert base / 2 < decode_step_floor_s(spec, 8, 128, MACHINE, weight_bytes=1.0) < base


def test_the_best_machine_is_the_best_in_each_respect() -> None:
    assert scaling._best([Machine(1, 5, 3), Machine(2, 4, 3)]) == Machine(2, 5, 3)


def test_charts_put_points_where_they_belong(tmp_path: Path) -> None:
    lines = [line_chart.Line("ours & others", [(10, 100), (1000, 1000)]), line_chart.Line("floor", [(10, 1000)], True)]
    path = tmp_path / "out.svg"
    line_chart.write_svg(path, [line_chart.Chart("a < b", "x", lines), line_chart.Chart("second", "x", lines)])
    root = ElementTree.parse(path).getroot()
    assert root.get("width") == str(2 * line_chart.WIDTH)
    assert {"a < b", "second", "ours & others"} <= {text.text for text in root.iter(f"{SVG}text")}
    drawn = next(item for item in root.iter(f"{SVG}path") if item.get("stroke") == line_chart.COLOURS[0])
    (x0, y0), (x1, y1) = (map(float, pair.split()) for pair in drawn.get("d", "")[1:].split("L"))
    assert math.isclose(x0, line_chart.LEFT) and math.isclose(x1, line_chart.WIDTH - line_chart.RIGHT)
    assert math.isclose(y0, line_chart.HEIGHT - line_chart.BOTTOM) and math.isclose(y1, line_chart.TOP)
