"""The setup that all tests share, and the choice of tests that run: `tests/tiers.py`."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# Threads of an operator spin while they wait for one another, in the other worker's time.  Read when torch is loaded;
# servers inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Triton's kernels are interpreted, but in tests/gpu.  Decided when triton is loaded, which other packages do, too.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Where a test names no device it runs on the CPU, also on a machine with a GPU.  Servers inherit it.
os.environ.setdefault("LOCKSTEP_DEVICE", "cpu")

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.tiers import Turns, tier_of, unknown_cases

# Hypothesis draws constants that it finds in the modules of this project that happen to be loaded: a derandomized test
# would play other examples in the whole run than alone.
providers._get_local_constants = providers.Constants  # type: ignore[assignment]

_TURNS = pytest.StashKey[Turns]()
_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()
_STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=["gate", "full"],
        help="gate: what every change must pass, with few examples; full: everything.  Without it: the gate, or all "
        "that there is of the files and tests that are named",
    )


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.option.tier = worker["tier"]
        config.stash[_TURNS] = Turns(Path(worker["turns"]))
    elif config.option.tier is None:
        config.option.tier = "full" if config.args_source is pytest.Config.ArgsSource.ARGS else "gate"
    if config.option.tier == "gate":
        settings.load_profile("gate")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # from a shell's background: servers would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_STARTED] = time.monotonic()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker process, before it starts, the tier and the folder of turns."""
    folder = node.config.stash.setdefault(_FOLDER, None) or tempfile.TemporaryDirectory(prefix="lockstep-tests-")
    node.config.stash[_FOLDER] = folder
    node.workerinput |= {"tier": node.config.option.tier, "turns": folder.name}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unknown = unknown_cases(items) if not any("::" in name for name in config.args) else []
    if unknown:
        raise pytest.UsageError(f"full(but=...) names cases that do not exist: {', '.join(unknown)}")
    if config.option.tier == "full":
        return
    of_gate = [item for item in items if tier_of(item) == "gate"]
    if len(of_gate) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if tier_of(item) != "gate"])
        items[:] = of_gate


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a serial test wait until the other workers have finished their tests."""
    turns = item.config.stash.get(_TURNS, None)
    with turns.enter(alone=item.get_closest_marker("serial") is not None) if turns else nullcontext():
        return (yield)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    seconds = time.monotonic() - config.stash[_STARTED]
    what = "everything" if config.option.tier == "full" else "the gate; `make test-full` runs everything"
    terminalreporter.write_line(f"{seconds / 60:.1f} minutes for {what}")


@pytest.fixture(autouse=True, scope="session")
def _one_compute_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and threads that wait for one another are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
