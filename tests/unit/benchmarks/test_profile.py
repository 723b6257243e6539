"""Steps by themselves, their summary, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.profile import machine, run
from benchmarks.profile.machine import Machine
from benchmarks.profile.operators import OperatorTimer, OperatorUse, operator_name
from benchmarks.profile.profile import Profile, Profiler, Workload, decode_head_start, runs_of, summarise
from benchmarks.profile.report import noise_line, operator_table, overview, phase_table
from benchmarks.profile.steps import BETWEEN, PLAYED, Step, StepRecorder
from rollout.cli import main as cli
from rollout.core.messages.io_struct import FlushCacheReqInput
from rollout.executor.recorded_forward import Tape
from rollout.scheduler.stats import PHASES, StepStats
from rollout.server.engine import Engine
from tests.model_zoo import tiny_checkpoint

pytestmark = pytest.mark.full

MACHINE = Machine(read_bytes_per_s=1e10, bf16_flops_per_s=1e11, fp32_flops_per_s=1e11)


def play(recorder: StepRecorder, operators: dict[str, int]) -> None:
    """Record one step, with the number of additions in each phase that `operators` gives."""
    recorder.start_step()
    for phase in PHASES:
        for _ in range(operators.get(phase, 0)):
            torch.ones(3).add(1)
        recorder.phase(phase)
    recorder.end_step(1)


def test_recorder_watches_the_chosen_steps_and_knows_their_phases() -> None:
    recorder = StepRecorder(lambda: 0, OperatorTimer(MACHINE), lambda i: i == 1)
    for _ in range(3):
        play(recorder, {"forward": 2, "process": 1})
    assert [step.uses is not None for step in recorder.steps] == [False, True, False]
    uses = recorder.steps[1].uses
    assert uses is not None
    assert {key: use.calls for key, use in uses.items() if key[1] == "aten.add"} == {
        ("forward", "aten.add"): 2,
        ("process", "aten.add"): 1,
    }
    assert recorder.num_steps == 3 and recorder.num_generated == 3
    for name in PHASES:
        assert sum(step.seconds[name] for step in recorder.steps) == pytest.approx(recorder.seconds[name])
    assert recorder.steps[0].seconds[BETWEEN] > 0 and recorder.steps[2].seconds[BETWEEN] == 0


def test_recorder_stops_watching_a_step_that_ends_early() -> None:
    timer = OperatorTimer(MACHINE)
    recorder = StepRecorder(lambda: 0, timer, lambda i: True)
    recorder.start_step()
    recorder.start_step()  # the first had nothing to do
    recorder.close()
    torch.ones(3)
    assert timer.take() == {}


@pytest.mark.parametrize("watched", [False, True])
def test_recorder_knows_what_a_tape_took_of_a_forward(engine: Engine, watched: bool) -> None:
    recorder = StepRecorder(lambda: 1, OperatorTimer(MACHINE), lambda _: watched)
    scheduler = engine.scheduler
    scheduler.stats, scheduler.runner.recorded.play = recorder, recorder.play
    try:
        engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    finally:
        recorder.close()
        scheduler.stats, scheduler.runner.recorded.play = StepStats(), Tape.play
    step = recorder.steps[-1]
    (tape, *_) = scheduler.runner.recorded._tapes.values()
    played = step.played_seconds()
    assert set(played) == {operator_name(operator) for operator in tape.operators}
    assert 0 < sum(played.values()) < step.seconds["forward"]
    assert (step.uses is not None) == watched
    if step.uses is None:
        return
    calls = Counter(operator_name(operator) for operator in tape.operators)
    assert {name: use.calls for (phase, name), use in step.uses.items() if phase == PLAYED} == calls
    assert step.uses["forward", "linear"].calls == 1, "the head is no part of the tape"


def unit(forward: float, operator: float | None, played: float | None = None) -> Step:
    step = Step(4)
    step.seconds["forward"] = forward
    if played is not None:
        step.tapes.append(([torch.ops.aten.mm.default], [round(1e9 * played)]))
        if operator is not None:
            step.uses = {(PLAYED, "aten.mm"): OperatorUse(1, operator, operator / 4, 100, 200)}
        return step
    if operator is not None:
        step.uses = {("forward", "linear"): OperatorUse(2, operator, operator / 4, 100, 200)}
    return step


def test_summary_takes_medians_and_keeps_the_two_kinds_apart() -> None:
    units = [unit(2.0, None), unit(3.0, None), unit(50.0, None), unit(9.0, 1.0), unit(9.0, 1.5), unit(9.0, 70.0)]
    profile = summarise("decode", 4, 4, units, (3e9, 4e9))
    assert profile.seconds == 3.0 and profile.operator_seconds == 1.5
    assert profile.tokens_per_s == pytest.approx(4 / 3)
    (forward,) = [phase for phase in profile.phases if phase.name == "forward"]
    assert (forward.seconds, forward.operator_seconds, forward.python_seconds) == (3.0, 1.5, 1.5)
    linear = profile.operators["linear"]
    assert (linear.calls, linear.seconds, linear.bytes_moved, linear.flops) == (2, 1.5, 100, 200)
    assert linear.least_seconds == pytest.approx((1.0 + 1.5 + 70.0) / 3 / 4)
    assert (profile.num_undisturbed, profile.num_watched) == (3, 3)
    assert profile.spread == pytest.approx((26.5 - 2.5) / 3)
    assert noise_line([profile]) is not None
    assert noise_line([dataclasses.replace(profile, spread=0.05)]) is None


def test_what_was_played_is_timed_in_undisturbed_steps() -> None:
    steps = [unit(2.0, None, 1.1), unit(2.0, None, 1.2), unit(2.0, None, 1.9), unit(9.0, 8.0, 7.0), unit(9.0, 7.0, 6.0)]
    profile = summarise("decode", 4, 4, steps, (3e9, 4e9))
    assert profile.played and profile.operators["aten.mm"].seconds == pytest.approx(1.2)
    assert profile.operators["aten.mm"].bytes_moved == 100
    (forward,) = [phase for phase in profile.phases if phase.name == "forward"]
    assert forward.python_seconds == pytest.approx(0.8)
    steps[0].tapes.clear()  # ran in Python: nothing is known of undisturbed ones then
    profile = summarise("decode", 4, 4, steps, (3e9, 4e9))
    assert not profile.played and profile.operators["aten.mm"].seconds == 7.5


def test_sums_are_the_sums_of_their_parts(profiles: list[Profile]) -> None:
    for profile in profiles:
        assert sum(phase.operator_seconds for phase in profile.phases) == pytest.approx(profile.operator_seconds)
        python = sum(phase.python_seconds for phase in profile.phases)
        assert python == pytest.approx(sum(phase.seconds for phase in profile.phases) - profile.operator_seconds)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Operators large enough to be most of the step, on one thread."""
    folder = tiny_checkpoint(
        tmp_path_factory.mktemp("bench") / "model",
        "moe",
        hidden_size=256,
        moe_intermediate_size=256,
        vocab_size=2000,
        context_length=2048,
    )
    return Engine(model_path=str(folder), skip_tokenizer_init=True, max_total_tokens=2048, chunked_prefill_size=64)


@pytest.fixture(scope="module")
def profiles(engine: Engine) -> list[Profile]:
    runs: list[None] = []
    profiler = Profiler(engine, MACHINE, Workload(20, 36, 0.0, 2000), lambda: runs.append(None))
    found = [profiler.decode(8), profiler.prefill(200)]
    assert len(runs) == runs_of(1, prefill=True)
    assert type(engine.scheduler.stats) is StepStats
    return found


def test_decode_steps_are_those_of_the_whole_batch(profiles: list[Profile]) -> None:
    decode, _ = profiles
    assert (decode.kind, decode.batch_size, decode.tokens) == ("decode", 8, 8)
    assert decode.num_undisturbed + decode.num_watched >= 32 and decode.num_watched >= 5 and decode.played
    assert decode.operators["paged_attention"].calls == 2  # layers
    assert decode.operators["fused_experts"].calls == 2


def test_prefill_is_the_whole_prompt(profiles: list[Profile]) -> None:
    _, prefill = profiles
    assert (prefill.tokens, prefill.num_undisturbed, prefill.num_watched) == (200, 3, 3)
    assert prefill.operators["fused_experts"].calls == 2 * 4  # layers, chunks of 64
    per_token = 3 * 3 * 256 * 256  # top-k experts of three matrices
    assert prefill.operators["fused_experts"].flops == 2 * 2 * 200 * per_token


def test_operator_times_add_up_to_the_undisturbed_ones(engine: Engine) -> None:
    """Operators timed one by one come to about the undisturbed whole: Python is a small part of a prefill.  Times are
    seconds of this thread, which other processes do not lengthen."""
    prompt = {"input_ids": [list(range(1024))], "sampling_params": {"max_new_tokens": 1}}
    undisturbed, timed = [], []
    for _ in range(4):
        engine.control(FlushCacheReqInput)
        start = time.thread_time()
        engine.generate(**prompt)
        undisturbed.append(time.thread_time() - start)
        engine.control(FlushCacheReqInput)
        with OperatorTimer(MACHINE, time.thread_time) as timer:
            engine.generate(**prompt)
        timed.append(sum(use.seconds for use in timer.take().values()))
    assert 0.6 < min(timed) / min(undisturbed) < 1.1


def test_every_table_names_its_rows(profiles: list[Profile]) -> None:
    decode, _ = profiles
    assert list(phase_table(decode).columns[0].cells) == [*PHASES, BETWEEN]
    names = list(operator_table(decode).columns[0].cells)
    assert "fused_experts" in names and names[-1] == "no operator"
    assert list(overview(profiles).columns[0].cells) == ["decode, batch 8", "prefill of 200"]


@pytest.mark.parametrize(("size", "length", "chunk", "expected"), [(1, 10, 64, 2), (64, 128, 2048, 5), (5, 9, -1, 6)])
def test_the_first_request_decodes_ahead_by_one_token_a_prefill_step(
    size: int, length: int, chunk: int, expected: int
) -> None:
    assert decode_head_start(size, length, chunk) == expected


@pytest.mark.parametrize(("by_onednn", "bf16"), [(True, 900.0), (True, 50.0), (False, 0.0)])
def test_products_in_bfloat16_are_left_out_where_torch_takes_minutes(
    by_onednn: bool, bf16: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def flops_per_s(size: int, dtype: torch.dtype) -> float:
        asked.append(dtype)
        return bf16 if dtype == torch.bfloat16 else 100.0

    monkeypatch.setattr(machine, "_product_flops_per_s", flops_per_s)
    monkeypatch.setattr(machine, "measure_reading", lambda: 7.0)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: by_onednn)
    assert machine.measure_machine() == Machine(7.0, max(bf16, 100.0), 100.0)
    assert (torch.bfloat16 in asked) == by_onednn


SMALL = ["--batch-sizes", "2", "--input-len", "8", "--output-len", "24", "--prefill", "16", "--threads", "1"]


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    files = ["--json", str(tmp_path / "out.json"), "--trace", str(tmp_path / "trace.json")]
    assert cli.main(["bench", "--model-path", str(folder), *SMALL, *files]) == 0
    printed = capsys.readouterr()
    assert "decode, batch 2" in printed.out and "GB/s read" in printed.out
    content = json.loads((tmp_path / "out.json").read_text())
    assert [profile["kind"] for profile in content["profiles"]] == ["decode", "prefill"]
    assert content["machine"]["read_bytes_per_s"] > 0
    names = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert {"batch 2", "prefill 16", "step", *PHASES} <= set(names)
    assert names.count("forward") == names.count("step") == 1 + 4 + 1


def test_the_long_prompt_is_as_long_as_the_context_allows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    words = [word for word in SMALL if word not in ("--prefill", "16")]
    assert cli.main(["bench", "--model-path", str(folder), *words]) == 0
    assert "prefill of 511" in capsys.readouterr().out


def refuse_to_measure() -> Machine:
    raise AssertionError("must be refused before anything is measured")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--input-len", "600"], "need a context of 626 tokens, but the model has 512"),
        (["--prefill", "512"], "need a context of 513 tokens, but the model has 512"),
        (["--trace", "/nowhere/trace.json"], "/nowhere is not a folder"),
        (["--batch-sizes", "1000000000", "--chunked-prefill-size", "100000000000"], "give smaller --batch-sizes"),
    ],
)
def test_the_command_refuses_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    extra: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(run, "measure_machine", refuse_to_measure)
    folder = tiny_checkpoint(tmp_path / "model")
    assert cli.main(["bench", "--model-path", str(folder), *SMALL, *extra]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(f"lockstep bench: .*{re.escape(message)}.*\n", error), error


def test_a_folder_without_a_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--model-path", str(tmp_path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_interrupted_benchmark_prints_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> Machine:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "measure_machine", interrupt)
    folder = tiny_checkpoint(tmp_path / "model")
    assert cli.main(["bench", "--model-path", str(folder), *SMALL]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_interrupting_the_imports_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupt)
    assert cli.main(["bench"]) == 130
    assert capsys.readouterr().err == ""
