"""The device under test, the numbers that a test notes, and one JSON line for every test.

`--gpu-device cpu` runs the same code where there is no device: kernels of Triton in its interpreter, the rest in plain
torch.  Without it and without a CUDA device pytest ends at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.kernels.gpu.register import load_gpu_kernels, triton_form
from rollout.kernels.operators import OPERATORS
from tests.gpu.needs import need_cuda


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run of the code")
    parser.addoption("--gpu-results", default=None, help="file for a JSON line a test")  # a word, for xdist


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu-device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is loaded


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--gpu-device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"tests/gpu needs a CUDA device, and torch {torch.__version__} sees none; --gpu-device cpu tries the code"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the collected tests; of workers only the first does, as each of them would run the same."""
    tests = [item.nodeid for item in getattr(session, "items", ())]
    if tests and getattr(session.config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":
        _write(session.config, {"kind": "collected", "tests": tests})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _LOGGED.append(report)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write a line for the test, and end the step if the device can compute nothing any more."""
    _LOGGED.clear()
    result = yield
    _write(item.config, _line(item, _LOGGED))
    if item.config.getoption("--gpu-device") == "cuda" and any(report.failed for report in _LOGGED):
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"the device is lost after {item.nodeid}: {error}", returncode=1)
    return result


_FACTS = pytest.StashKey[dict[str, Any]]()
_LOGGED: list[pytest.TestReport] = []


def _line(item: pytest.Item, reports: list[pytest.TestReport]) -> dict[str, Any]:
    worst = max(reports, key=lambda report: ("passed", "skipped", "failed").index(report.outcome))
    reason = ""
    if worst.outcome == "skipped":
        reason = str(worst.longrepr[2] if isinstance(worst.longrepr, tuple) else worst.longrepr)
        reason = reason.removeprefix("Skipped: ")
    elif worst.outcome == "failed":
        reason = f"{worst.when}: {_last_lines(worst)}"
    return {
        "kind": "test",
        "test": item.nodeid,
        "outcome": worst.outcome,
        "seconds": round(sum(report.duration for report in reports), 3),
        "reason": reason,
        "facts": item.stash.get(_FACTS, {}),
    }


def _last_lines(report: pytest.TestReport) -> str:
    errors = [line[2:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return " / ".join(errors[:4]) or report.longreprtext[-300:]


def _write(config: pytest.Config, line: dict[str, Any]) -> None:
    path = config.getoption("--gpu-results")
    if path is not None:
        with Path(path).open("a") as file:  # of one write each: workers share it
            file.write(json.dumps(line, default=str) + "\n")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--gpu-device"))


@pytest.fixture(scope="session")
def on_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if request.param == torch.bfloat16:
        need_cuda(device, "bfloat16: Triton's interpreter computes it wrongly")
    return request.param


@pytest.fixture
def op(on_cuda: bool) -> Callable[[str], Callable[..., Any]]:
    """Return a function from an operator's name to the operator, as a model on the device calls it."""
    if on_cuda:
        status = load_gpu_kernels()
        assert status.available, status.reason
        return lambda name: OPERATORS[name].registered
    return triton_form


@pytest.fixture
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Facts that a test puts here are in its line, and in the report."""
    return request.node.stash.setdefault(_FACTS, {})


@pytest.fixture(autouse=True)
def _memory_goes_back(device: torch.device) -> Iterator[None]:
    yield
    if device.type == "cuda":
        torch.cuda.empty_cache()
