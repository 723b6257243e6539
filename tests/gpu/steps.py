"""The steps of `make test-gpu`: a file of tests each, in a process of its own, with a time that it may take.

The times sum to at most eleven minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT_S = 660
NOT_RUN = "NOT RUN: "
"""The start of the reason of a test that cannot run on this machine; a skip without it counts as a failure."""


@dataclass(frozen=True)
class Step:
    """`file` under tests/gpu; `workers`: processes of pytest-xdist, where it is installed (kernels compile in each)."""

    name: str
    file: str
    budget_s: int
    workers: int = 1


STEPS = (
    Step("machine", "test_machine.py", 20),
    Step("kernels", "test_kernels.py", 55, workers=4),
    Step("operators", "test_operators.py", 40, workers=4),
    Step("parity", "test_parity.py", 70, workers=4),
    Step("attention", "test_attention.py", 30),
    Step("forms", "test_attention_forms.py", 40),
    Step("fixed", "test_fixed.py", 40),
    Step("sampling", "test_sampling.py", 20),
    Step("graphs", "test_graphs.py", 50),
    Step("loops", "test_loops.py", 50),
    Step("settings", "test_settings.py", 60),
    Step("refresh", "test_refresh.py", 50),
    Step("processes", "test_processes.py", 45),
    Step("memory", "test_memory.py", 30),
    Step("ranks", "test_ranks.py", 60),
)
