"""Runs the steps, one process after another, and reports the outcome of every test.

    pytest of a step --JSON lines--> judge --> Outcome --> table, results.jsonl, exit status

A step that hangs is killed with all that it started; the next one runs.  Nothing is left out in silence: a test that
was collected and has no result, a skip without a reason, a step without tests are failures.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.steps import NOT_RUN, Step

ROOT = Path(__file__).resolve().parents[2]
EXIT_OF_FAILURES = 1  # pytest's for tests that failed


@dataclass
class Outcome:
    """The outcome of one step; `failures` and `not_run` are (test, why)."""

    step: str
    seconds: float
    budget_s: float
    passed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return not self.failures


def judge(
    step: Step, lines: Sequence[Mapping[str, Any]], exit_status: int | None, seconds: float, log_tail: str = ""
) -> Outcome:
    """Turn the lines that a step wrote, in order, into its outcome.

    `exit_status` None: the step was killed when its time was over.
    """
    outcome = Outcome(step.name, seconds, step.budget_s)
    collected = [test for line in lines if line["kind"] == "collected" for test in line["tests"]]
    results = {line["test"]: line for line in lines if line["kind"] == "test"}
    for test, line in results.items():
        if line["facts"]:
            outcome.facts[test] = line["facts"]
        if line["outcome"] == "passed":
            outcome.passed += 1
        elif line["outcome"] == "skipped" and line["reason"].startswith(NOT_RUN) and line["reason"] != NOT_RUN:
            outcome.not_run.append((test, line["reason"].removeprefix(NOT_RUN)))
        elif line["outcome"] == "skipped":
            outcome.failures.append((test, f"skipped without a stated reason: {line['reason'] or 'none'}"))
        else:
            outcome.failures.append((test, line["reason"]))
    if exit_status is None:
        outcome.failures.append((step.name, f"killed after {step.budget_s} s"))
    outcome.failures += [(test, "was not reached") for test in collected if test not in results]
    if not collected:
        outcome.failures.append((step.name, f"no test was collected: {log_tail or 'no output'}"))
    elif exit_status not in (0, None) and not outcome.failures:
        outcome.failures.append((step.name, f"pytest ended with {exit_status}: {log_tail}"))
    return outcome


def run_step(step: Step, out: Path, *, device: str, budget_factor: float = 1.0) -> Outcome:
    """Run a step; its output goes to `out`/STEP.log, its results to `out`/STEP.jsonl."""
    results, log = out / f"{step.name}.jsonl", out / f"{step.name}.log"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"tests/gpu/{step.file}", "--tb=short", "-rs"]
    command += ["--gpu-device", device, "--gpu-results", str(results)]
    if step.workers > 1 and device == "cuda" and importlib.util.find_spec("xdist"):
        command += ["-n", str(step.workers)]
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(device),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        exit_status: int | None = None
        try:
            exit_status = process.wait(step.budget_s * budget_factor)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_group(process)
    tail = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return judge(step, lines, exit_status, time.monotonic() - started, tail)


def _environment(device: str) -> dict[str, str]:
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "4"}
    if device == "cpu":
        variables |= {"OMP_NUM_THREADS": "1"}
    else:
        # Memory that another process opens by its handle must not lie in expandable segments.
        variables |= {"PYTORCH_ALLOC_CONF": "expandable_segments:False", "TRITON_INTERPRET": "0"}
    return os.environ | variables


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill all that the step started and left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(outcomes: Sequence[Outcome], heading: str) -> str:
    """Write the table, then every failure and every test that was not run, then the numbers that tests noted."""
    lines = [heading, "", f"{'step':<12}{'passed':>7}{'failed':>7}{'not run':>8}{'s':>8}{'of':>5}"]
    for one in outcomes:
        counts = f"{one.passed:>7}{len(one.failures):>7}{len(one.not_run):>8}"
        lines.append(f"{one.step:<12}{counts}{one.seconds:>8.1f}{one.budget_s:>5.0f}")
    total = sum(one.seconds for one in outcomes)
    lines += ["", f"{total:.0f} seconds in all"]
    lines += [f"FAILED   {one.step}: {test}: {_short(why)}" for one in outcomes for test, why in one.failures]
    by_reason: dict[tuple[str, str], list[str]] = {}
    for one in outcomes:
        for test, why in one.not_run:
            by_reason.setdefault((one.step, why), []).append(test)
    lines += [f"NOT RUN  {step}: {why}: {', '.join(map(_name, tests))}" for (step, why), tests in by_reason.items()]
    lines += [f"{one.step}: {_name(test)}: {_numbers(facts)}" for one in outcomes for test, facts in one.facts.items()]
    return "\n".join(lines)


def _name(test: str) -> str:
    """Return the test's name without the file, which is the step's."""
    return test.rpartition("::")[2]


def _short(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]} ..."


def _numbers(facts: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in facts.items()
    )
