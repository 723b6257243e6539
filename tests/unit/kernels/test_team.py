"""The team of threads that operators share: `check_team.cpp`, also under the thread sanitizer.

Mistakes are also put in, so that its checks are known to notice them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.check_programs import headers_with, run_check

PROGRAM = Path(__file__).with_name("check_team.cpp")
SOON = ("-DLOCKSTEP_DEADLINE_SECONDS=20",)  # some mistakes make it wait for ever


@pytest.mark.parametrize("policy", ["", "passive"])
def test_the_team_does_what_it_says(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    done = run_check(PROGRAM)
    assert done.returncode == 0, done.stdout


CORES_OF_HELPERS = """
import json, os, time
from pathlib import Path
cores = sorted(os.sched_getaffinity(0))
import torch
from rollout.kernels.build import load_kernels
assert load_kernels().available
torch.set_num_threads(2)
rows = torch.randn(4096, 256)
torch.ops.lockstep.silu_and_mul(rows)
def cores_of_helpers():
    tasks = Path("/proc/self/task").iterdir()
    tasks = [task for task in tasks if (task / "comm").read_text().strip() == "lockstep-helper"]
    return [sorted(os.sched_getaffinity(int(task.name))) for task in tasks]
# The call does not wait for a helper that has not come yet.
deadline = time.monotonic() + 20
while cores_of_helpers() != [cores] and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps(cores_of_helpers()))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are bound to cores as on Linux")
@pytest.mark.parametrize(
    "variable", [{}, {"OMP_PROC_BIND": "true"}, {"OMP_PROC_BIND": "spread", "OMP_PLACES": "cores"}]
)
def test_a_helper_does_not_share_the_core_that_openmp_binds_its_caller_to(variable: dict[str, str]) -> None:
    words = [sys.executable, "-c", CORES_OF_HELPERS]
    done = subprocess.run(words, env=os.environ | variable, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [sorted(os.sched_getaffinity(0))]


@pytest.mark.full
@pytest.mark.parametrize("policy", ["", "passive"])
def test_the_thread_sanitizer_finds_no_race(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    done = run_check(PROGRAM, flags=("-fsanitize=thread", "-g1"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        # Phases follow each other as soon as items are handed out; a call returns while helpers are still inside.
        ("parallel.h", "before->wait_until_finished(team);", ""),
        ("team.cpp", "inside_.wait_for_zero(patience_);", ""),
        # Every existing helper takes part; a sleeping one is not woken; a helper enters a closed call.
        ("team.cpp", "&& me.index < wanted_", ""),
        ("team.cpp", "if (call.exchange(before + 1) == before) wake_all(call);", "call.exchange(before + 1);"),
        ("team.cpp", "inside_.add(1) & kOpen && ", "(inside_.add(1), true) && "),
        # The caller waits until a helper has come, as in a barrier.
        (
            "team.cpp",
            "  try_body();\n  inside_",
            "  try_body();\n  while (inside_.add(0) == kOpen) pause_briefly();\n  inside_",
        ),
        # Chance is taken for a crowd; so is sleep; a crowd is believed in for ever; waiting does not count.
        ("patience.cpp", "|| kCrowdedPart * waited < computed + waited", ""),
        ("patience.cpp", "!= 2) computed = -1;", "!= 2) computed = -1;\n  waited = time - computed;"),
        ("patience.cpp", "crowded_until_.store(time + next", "crowded_until_.store(time + 100 * next"),
        ("patience.cpp", "computed - computed_, waited - waited_);", "computed - computed_, 0);"),
        # A refused call leaves the door open.
        (
            "team.cpp",
            "  while (helpers_.size() < wanted_) start_helper();\n",
            "  inside_.add(kOpen);\n  while (helpers_.size() < wanted_) start_helper();\n  inside_.subtract(kOpen);\n",
        ),
        # An exception is lost.
        ("team.cpp", "if (!error_) error_ = std::current_exception();", ""),
        # A child believes in the helpers of its parent.
        ("team.cpp", "[] { team_of_process.store(nullptr); }", "[] {}"),
    ],
)
def test_a_mistake_is_noticed(tmp_path: Path, file: str, right: str, wrong: str) -> None:
    headers = headers_with((file, right, wrong), tmp_path)
    assert run_check(PROGRAM, headers=headers, flags=SOON).returncode != 0


@pytest.mark.mutant
def test_a_helper_that_looks_for_work_where_it_may_rest_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # the policy of tests is not to look
    right = "is_called() || rests.load(std::memory_order_relaxed)"
    headers = headers_with(("team.cpp", right, "is_called()"), tmp_path)
    assert "may rest looks for work" in run_check(PROGRAM, headers=headers, flags=SOON).stdout
