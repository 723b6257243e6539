"""The end of a request: an abort counts once, and nothing of a request stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.core.messages.io_struct import AbortReqInput
from tests.late_loop import captured_loop  # noqa: F401
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness

PROMPT = [5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=1)


@pytest.mark.parametrize("phase", ["running", "waiting"])
def test_engine_01_a_repeated_rid_in_an_abort_counts_once(folder: Path, phase: str) -> None:
    harness = Harness(folder)
    first = harness.submit(PROMPT, params={"max_new_tokens": 8})
    if phase == "running":
        harness.tick()
    other = harness.submit(PROMPT, params={"max_new_tokens": 8})
    harness.channel.inbox.append(AbortReqInput(rids=[first, "unknown", first, first]))
    harness.run()
    assert harness.results[first].finished.reason.type == "abort"
    assert harness.results[other].finished.reason.type == "length"
    harness.check_idle()


def test_engine_01_a_failing_abort_is_logged_and_the_loop_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    harness = Harness(folder)
    rid = harness.submit(PROMPT, params={"max_new_tokens": 8})
    with monkeypatch.context() as patched:
        patched.setattr(harness.scheduler, "abort", lambda rids: 1 / 0)
        harness.channel.inbox.append(AbortReqInput(rids=[rid]))
        harness.tick()
    harness.run()
    assert harness.results[rid].finished.reason.type == "length"
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.parametrize("disabled", [False, True])
def test_engine_14_roots_go_with_their_last_child(folder: Path, disabled: bool) -> None:
    harness = Harness(folder, max_total_tokens=256, disable_radix_cache=disabled)
    for index in range(60):  # more than the pool holds: eviction takes tokens of earlier keys
        harness.generate([PROMPT], {"max_new_tokens": 4}, extra_key=f"key {index}")
    cache = harness.scheduler.cache.prefix_cache
    with_content = {namespace for namespace, root in cache._roots.items() if root.children}
    assert set(cache._roots) == with_content and len(with_content) <= 256 // len(PROMPT)
    assert disabled == (not with_content)
    harness.check_idle()
