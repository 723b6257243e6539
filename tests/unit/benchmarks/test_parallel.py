"""The benchmark of several ranks: collectives counted against the formula, work that is really done, tables."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from benchmarks import bar_chart, parallel
from benchmarks.parallel_collectives import Engine, step_needs, tally
from benchmarks.parallel_ranks import GatherPerLayer, RankDriver, StepTaken, Work
from benchmarks.parallel_steps import counted, decode_rate, differences, prefill_rate, shape_of
from capture.capturer import RoutedExpertsCapturer
from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.distributed.communicator import share_sizes
from rollout.distributed.layout import ParallelLayout, layout_of
from rollout.distributed.parallel import Parallel
from rollout.families.registry import load_model_config
from tests.model_zoo import tiny_checkpoint
from tests.ranks import run_ranks

pytestmark = pytest.mark.full

DP = {"enable_dp_attention": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "tp4": {"tp_size": 4},
    "tp2_ep2": {"tp_size": 2, "ep_size": 2},
    "tp4_ep2": {"tp_size": 4, "ep_size": 2},
    "scattered": {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
    "dp2": {"tp_size": 2, "ep_size": 2, "dp_size": 2, **DP},
    "dp2_a2a": {"tp_size": 2, "ep_size": 2, "dp_size": 2, "moe_a2a_backend": "all_to_all", **DP},
    "dp2_tp2": {"tp_size": 4, "ep_size": 4, "dp_size": 2, **DP},
    "dp2_tp2_a2a": {"tp_size": 4, "ep_size": 4, "dp_size": 2, "moe_a2a_backend": "all_to_all", **DP},
}
# Three requests, so that ranks differ; prompts of two chunks, so that a prefill step comes without messages.
PROMPTS = [[seed, *range(2, 40 + seed)] for seed in (1, 2, 3)]
WORK = Work(prompts=PROMPTS, new_tokens=6, counts=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", kv_heads=4)


def settings_of(folder: Path, **settings: Any) -> ServerArgs:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_total_tokens": 1024,
        "num_threads": 1,
        "chunked_prefill_size": 32,
    }
    args = ServerArgs(model_path=str(folder), **defaults | settings)
    check_settings(args)
    return args


def run_work(args: ServerArgs, work: Work) -> list[list[StepTaken]]:
    return run_ranks(layout_of(args), lambda parallel: RankDriver(args, parallel).run(work))


def engine_of(args: ServerArgs) -> Engine:
    return Engine(layout_of(args), load_model_config(args.model_path), args.moe_a2a_backend, 4)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_collectives_are_those_of_the_formula(folder: Path, name: str) -> None:
    args = settings_of(folder, **LAYOUTS[name])
    engine, by_rank = engine_of(args), run_work(args, WORK)
    assert len({len(steps) for steps in by_rank}) == 1
    kinds = set()
    for steps in list(zip(*by_rank))[1:]:  # the first turn also brings the messages
        shape = shape_of(engine.layout, steps)
        kinds.add("prefill" if any(step.num_extend_tokens for step in steps) else "decode")
        for rank, step in enumerate(steps):
            assert counted(step) == tally(step_needs(engine, rank, shape)), (rank, shape)
    assert kinds == {"prefill", "decode"}


def test_routes_of_slices_take_no_collective_of_their_own(folder: Path) -> None:
    args = settings_of(folder, **LAYOUTS["scattered"], enable_return_routed_experts=True)
    engine = engine_of(args)

    def both(parallel: Parallel) -> tuple[list[StepTaken], ...]:
        driver = RankDriver(args, parallel)
        variants = ("off", "recorded", "per_layer")
        return tuple(driver.run(msgspec.structs.replace(WORK, routes=routes)) for routes in variants)

    off, once, per_layer = zip(*run_ranks(layout_of(args), both))
    for steps in list(zip(*once))[1:]:
        assert differences(engine, steps, routes=True) == [] != differences(engine, steps)
    gathers = [run[0][-1].sent["attn_tp all_gather"][0] for run in (off, once, per_layer)]
    assert gathers[1] == gathers[0]
    assert gathers[2] - gathers[0] == len(engine.config.moe_layer_ids) == 2


def test_a_gather_per_layer_gives_the_same_rows(folder: Path) -> None:
    ids_LTK = torch.randint(0, 8, (2, 7, 3))

    class Runner:
        """The part of a runner that `GatherPerLayer` reads."""

        def __init__(self, parallel: Parallel) -> None:
            config = load_model_config(folder)
            self.state = type("State", (), {"model": type("Model", (), {"config": config, "parallel": parallel})})

    def gather(parallel: Parallel) -> torch.Tensor:
        rows = ids_LTK.split(share_sizes(7, 2), dim=1)[parallel.attn_tp.rank]
        batch = type("Batch", (), {"num_tokens": 7})
        capturer = GatherPerLayer(RoutedExpertsCapturer(2, 3, 8), Runner(parallel), lambda: batch)  # type: ignore
        capturer.begin_step(rows.shape[1])
        for layer in range(2):
            capturer.record(layer, rows[layer])
        return capturer.finish_step()

    for found in run_ranks(ParallelLayout(tp_size=2, ep_size=2), gather):
        assert torch.equal(found.transpose(0, 1), ids_LTK)


def test_one_collective_too_many_is_reported(folder: Path) -> None:
    args = settings_of(folder, **LAYOUTS["dp2"])
    steps = [run[2] for run in run_work(args, WORK)]
    calls, num_bytes = steps[1].sent["tp broadcast"]
    steps[1].sent["tp broadcast"] = (calls + 1, num_bytes)
    (found,) = differences(engine_of(args), steps)
    assert found == "rank 1, tp broadcast: (2, 0) counted, (1, 0) by formula"
    steps[1].sent["tp broadcast"] = (calls, num_bytes)
    steps[0].num_tokens += 1  # the formula follows the tokens
    assert differences(engine_of(args), steps)


def test_work_that_is_not_done_is_reported(folder: Path) -> None:
    args = settings_of(folder)
    driver = RankDriver(args, Parallel())
    with pytest.raises(AssertionError, match="abort"):
        driver.run(Work(prompts=[[1] * 500], new_tokens=2000))  # more than the KV pool has
    assert len(driver.run(Work(prompts=PROMPTS[:1], new_tokens=4))) == 5  # two chunks, three more tokens


def steps_of(*seconds: float, tokens: int, extend: int = 0) -> list[StepTaken]:
    return [StepTaken(second, tokens, extend, tokens) for second in seconds]


def test_decode_and_prefill_rates_equal_counts_by_hand() -> None:
    prefill, decode = steps_of(9.0, tokens=4, extend=4), steps_of(1.0, 2.0, 90.0, tokens=4)
    assert decode_rate(ParallelLayout(tp_size=2), [prefill + decode] * 2, 4) == 2.0
    replicas = [prefill + decode, steps_of(1.0, tokens=4)]
    assert decode_rate(ParallelLayout(dp_size=2), replicas, 8) == 2.0 + 4.0
    assert decode_rate(ParallelLayout(tp_size=2, dp_size=2, enable_dp_attention=True), replicas, 8) == 4.0
    assert prefill_rate([steps_of(1.0, 2.0, tokens=8, extend=8), steps_of(4.0, tokens=8, extend=8)], 32) == 8.0


@pytest.mark.gate
def test_each_series_has_an_axis_of_its_own_n42(tmp_path: Path) -> None:
    """N42: 7,736 and 33,620 were bars of one length side by side, and no axis showed the scales."""
    path = tmp_path / "bars.svg"
    charts = [bar_chart.Bars("t", ["decode", "prefill"], {"a": [7736.0, 33620.0], "b": [481.0, 12352.0]})]
    bar_chart.write_svg(path, charts)
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(path).getroot()
    bars = [{name: float(bar.get(name)) for name in ("x", "width")} for bar in list(root.iter(f"{svg}rect"))[1:]]
    assert len(bars) == 4 and len({bar["x"] for bar in bars}) == 2, "a panel for each series"
    texts = [(float(text.get("x")), text.text) for text in root.iter(f"{svg}text")]
    for bar, value in zip(bars, (7736.0, 33620.0, 481.0, 12352.0), strict=True):
        x, tick = next(
            (x, text) for x, text in texts if text in ("5,000", "20,000") and 0 < x - bar["x"] <= bar_chart.BARS
        )
        per_pixel = float(tick.replace(",", "")) / (x - bar["x"])
        assert bar["width"] * per_pixel == pytest.approx(value, rel=0.01)


def test_tables_say_what_was_measured(tmp_path: Path) -> None:
    rates = {"decode 8": 50.0, "prefill": 400.0}
    layouts = [
        {"layout": "1 rank", "tokens_per_s": rates, "against_one": dict.fromkeys(rates, 1.0)},
        {"layout": "tp 2", "tokens_per_s": {"decode 8": 25.0, "prefill": 600.0}}
        | {"against_one": {"decode 8": 0.5, "prefill": 1.5}},
    ]
    counts = [
        {"layout": "tp 2", "step": "decode 8", "calls": {"broadcast": 1}, "num_bytes": 4120, "differences": found}
        for found in ([], ["rank 0: wrong"])
    ]
    routes = [
        {"variant": name, "decode_step_s": 0.01, "prefill_s": 0.1, "decode_cost": cost, "prefill_cost": 0.0}
        for name, cost in (("recorded", 0.06), ("per_layer", 0.3))
    ]
    console = Console(file=StringIO(), width=200)
    console.print(parallel._layout_table("S", layouts, 3))
    console.print(parallel._count_table("S", counts), parallel._route_table("S", routes))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("600 (1.50x)", "4.1", "same", "other", "+6.0 %", "+30.0 %"):
        assert words in text
    path = tmp_path / "bars.svg"
    bar_chart.write_svg(path, [parallel._bars("S", layouts)])
    svg = "{http://www.w3.org/2000/svg}"
    widths = [bar.get("width") for bar in ElementTree.parse(path).getroot().iter(f"{svg}rect")]
    full, half, two_thirds = (f"{bar_chart.BARS * share:.1f}" for share in (1, 1 / 2, 2 / 3))
    assert widths[1:5] == [full, two_thirds, half, full]
