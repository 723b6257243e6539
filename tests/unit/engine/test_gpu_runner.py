"""The runner of `make test-gpu`: nothing is skipped in silence, and a machine without a device fails at once."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import decode, refresh
from benchmarks.gpu.model import MEANWHILE, driver, shape
from benchmarks.gpu.settings import Settings
from tests.gpu.check_imports import chains, first_missing
from tests.gpu.engines import checkpoint
from tests.gpu.runner import judge, report
from tests.gpu.steps import LIMIT_S, NOT_RUN, STEPS, Step
from tests.model_zoo import logical_tensors
from tests.parameter_server_stand_in import bucket_bytes_for, plan

ROOT = Path(__file__).resolve().parents[3]
STEP = Step("step", "test_step.py", 30)


def line(test: str, outcome: str = "passed", reason: str = "", **facts: Any) -> dict[str, Any]:
    return {"kind": "test", "test": test, "outcome": outcome, "reason": reason, "facts": facts}


def collected(*tests: str) -> dict[str, Any]:
    return {"kind": "collected", "tests": list(tests)}


def test_what_passed_and_what_could_not_run() -> None:
    lines = [collected("a", "b"), line("a", speed=3.0), line("b", "skipped", f"{NOT_RUN}needs 2 CUDA devices")]
    outcome = judge(STEP, lines, 0, 3.0)
    assert outcome.holds and outcome.passed == 1 and outcome.not_run == [("b", "needs 2 CUDA devices")]
    text = report([outcome], "heading")
    assert "NOT RUN  step: needs 2 CUDA devices: b" in text and "a: speed 3" in text


@pytest.mark.parametrize(
    ("lines", "status", "why"),
    [
        ([collected("a"), line("a", "failed", "call: assert 1 == 2")], 1, "assert 1 == 2"),
        ([collected("a"), line("a", "skipped", "unconditional skip")], 0, "without a stated reason"),
        ([collected("a"), line("a", "skipped", NOT_RUN)], 0, "without a stated reason"),
        ([collected("a", "b"), line("a")], 1, "was not reached"),
        ([collected("a"), line("a")], None, "killed after 30 s"),
        ([collected("a"), line("a")], 2, "pytest ended with 2"),
        ([collected("a"), line("a")], -11, "pytest ended with -11"),
        ([], 0, "no test was collected"),
        ([], 5, "no test was collected"),
    ],
)
def test_what_is_a_failure(lines: list[dict[str, Any]], status: int | None, why: str) -> None:
    outcome = judge(STEP, lines, status, 30.0, "the log's end")
    assert not outcome.holds and why in report([outcome], "heading")


def test_steps_are_files_and_fit_into_the_time() -> None:
    assert sum(step.budget_s for step in STEPS) <= LIMIT_S
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {step.file for step in STEPS} == files, "a file that no step runs would never run"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("module", ["tests.gpu", "benchmarks.gpu"])
def test_without_a_device_the_commands_end_at_once(module: str) -> None:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.strip().splitlines()) == 1
    assert "needs a CUDA device" in done.stderr and time.monotonic() - started < 60


def test_names_that_do_not_exist_are_found() -> None:
    source = "import torch\nimport torch.distributed as dist\ntorch.cuda.CUDAGraph\ntorch.cuda.no_such\ndist.nothing(1)"
    found = [(number, first_missing(chain)) for number, chain in chains(ast.parse(source))]
    assert (4, "torch.cuda.no_such") in found and (5, "torch.distributed.nothing") in found
    assert all(missing is None for number, missing in found if number == 3)


@pytest.mark.full
def test_the_steps_run_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "FAILED" not in done.stdout and (tmp_path / "report.txt").is_file()


@pytest.mark.full
def test_the_benchmarks_run_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "not installed" in done.stdout


def test_requests_decode_together_after_prompts_of_many_steps() -> None:
    """First runs on a GPU: at 256 requests the first ended before the prompts of the last were computed."""
    spec = shape(Settings(torch.device("cpu"), 2, dry_run=True))
    sizes = {"max_total_tokens": 20 * (8 + 4 + MEANWHILE), "max_running_requests": 20, "chunked_prefill_size": 8}
    with driver(spec, torch.device("cpu"), dtype="float32", **sizes) as engine:
        assert engine.seconds_per_decode_step(20, 8, 4) > 0


def test_a_mixed_step_has_the_chunk_that_its_budget_leaves() -> None:
    spec = shape(Settings(torch.device("cpu"), 2, dry_run=True))
    sizes = {"max_total_tokens": 1024, "max_running_requests": 4, "chunked_prefill_size": 8}
    with driver(spec, torch.device("cpu"), dtype="float32", disable_radix_cache=True, **sizes) as engine:
        engine.seconds_of_mixed_step(2, 4, 24)
        before = engine.scheduler.stats.num_steps
        engine.seconds_of_mixed_step(2, 4, 24)
        assert engine.scheduler.stats.num_steps - before > 24 / 8
        assert not engine.scheduler.has_work


@pytest.mark.parametrize(
    ("variant", "held"), [("all on", set()), ("fp8", {"fp8"}), ("int4", {"int4"})], ids=["all on", "fp8", "int4"]
)
def test_variants_of_the_decode_part_hold_their_format(variant: str, held: set[str]) -> None:
    settings = Settings(torch.device("cpu"), 2, dry_run=True)
    common = {"dtype": "float32", "max_total_tokens": 64, "max_running_requests": 2}
    with driver(shape(settings), settings.device, **common | decode.settings_of(variant, settings)) as engine:
        formats = engine.scheduler.runner.state.model.weights.held_formats()
        assert {form.flag.split()[-1] for form in formats.values()} == held
    on_cuda = decode.settings_of(variant, Settings(torch.device("cuda"), 48, dry_run=False))
    assert on_cuda.get("quantization") == (variant if held else None)


@pytest.mark.parametrize(("gib", "copies", "layers"), [(139, 2, 48), (139, 3, 12), (79, 2, 12), (32, 3, 4), (13, 2, 0)])
def test_a_refresh_has_the_whole_model_where_all_copies_fit(
    gib: int, copies: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-30B-A3B takes 61 GB a copy, and at most 12 layers are taken of what does not fit as a whole."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gib << 30, gib << 30))
    settings = Settings(torch.device("cuda"), 48, dry_run=False)
    spec = refresh.that_fits(shape(settings), copies, settings)
    assert (0 if spec is None else spec.layers) == layers
    if layers == 48:
        assert spec is not None and 60 < refresh.num_bytes(spec, settings) / 1e9 < 62


def test_buckets_of_the_parameter_server_hold_the_tensors_of_a_model_on_a_device(tmp_path: Path) -> None:
    """First runs on a GPU: tensors of the models there were larger than a bucket."""
    folder = checkpoint(tmp_path / "model", torch.device("cuda"))
    named = list(logical_tensors(folder).items())
    buckets = plan(named, bucket_bytes_for(named))
    assert len(buckets) > 2 and [item for bucket in buckets for item in bucket] == named
