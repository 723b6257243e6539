"""The demo's checks: a good report passes each, and each fails on a report that is wrong in just that respect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from examples.demo.checks import rows_of
from examples.demo.messages import (
    Failure,
    Message,
    Progress,
    RolloutReport,
    StepReport,
    TrainerReport,
    decode,
    encode,
)
from examples.demo.mismatch import BitAgreement, LogprobMismatch, RouteMismatch

OLD = {"a": "0" * 16, "b": "1" * 16}
NEW = {"a": "2" * 16, "b": "1" * 16}


def mismatch(mean_abs: float, kl: float) -> LogprobMismatch:
    return LogprobMismatch(num_tokens=100, mean_abs=mean_abs, max_abs=1.0, kl=kl)


def rollout_report(version: str, **changes: Any) -> RolloutReport:
    report = RolloutReport(
        version=version,
        num_samples=8,
        num_tokens=100,
        reward_mean=0.1,
        num_groups_with_signal=2,
        num_groups=2,
        num_version_problems=0,
        version_problems=[],
        own=mismatch(0.04, 0.002),
        routes=RouteMismatch(token_share=0.2, token_layer_share=0.05),
        forced=mismatch(0.02, 0.0005),
        stale=None if version == "0" else mismatch(1.0, 0.5),
        exact=BitAgreement(num_tokens=100, num_equal=100, kl=0.0),
    )
    return msgspec.structs.replace(report, **changes)


def step_report(**changes: Any) -> StepReport:
    report = StepReport(
        version="1",
        loss_before=0.1,
        loss_after=-0.1,
        gradient_norm=1.0,
        refresh_bytes=1000,
        refresh_seconds=0.1,
        engine_before=OLD,
        engine_after=NEW,
        trainer_after=NEW,
    )
    return msgspec.structs.replace(report, **changes)


@dataclass
class Parts:
    """The parts of a report; a test changes one of them."""

    first: dict[str, Any]
    step: dict[str, Any]
    second: dict[str, Any]
    start: dict[str, str]


def failed(parts: Parts) -> list[tuple[str, str]]:
    """Return section and name of each check that fails."""
    rollouts = [rollout_report("0", **parts.first), rollout_report("1", **parts.second)]
    report = TrainerReport(rollouts, [step_report(**parts.step)], parts.start)
    return [(row.section, row.name) for row in rows_of(report) if row.ok is False]


def test_a_good_report_passes_every_check() -> None:
    assert failed(Parts({}, {}, {}, OLD)) == []


ROUND_1 = "Rollout, weight version 1"
REFRESH = "Refresh to version 1"
EXACT_BITS = "log-probs with the engine's bits, engine numerics"
STEP = "Policy-gradient step 1, routes forced"


@pytest.mark.parametrize(
    ("part", "changes", "section", "name"),
    [
        ("second", {"num_version_problems": 1}, ROUND_1, "samples that carry this version, KV and routes too"),
        ("second", {"forced": mismatch(0.05, 0.0005)}, ROUND_1, "mean |Δ log-prob|, engine's routes forced"),
        ("second", {"forced": mismatch(0.02, 0.003)}, ROUND_1, "KL(engine, trainer), routes forced"),
        ("second", {"forced": mismatch(float("nan"), 0.0)}, ROUND_1, "mean |Δ log-prob|, engine's routes forced"),
        ("second", {"stale": mismatch(0.03, 0.001)}, ROUND_1, "mean |Δ log-prob|, weights before the step, forced"),
        ("second", {"exact": BitAgreement(100, 100, 1e-12)}, ROUND_1, "KL(engine, trainer), engine numerics"),
        ("second", {"exact": BitAgreement(100, 99, 0.0)}, ROUND_1, EXACT_BITS),
        ("second", {"exact": BitAgreement(0, 0, 0.0)}, ROUND_1, EXACT_BITS),
        ("step", {"gradient_norm": 0.0}, STEP, "norm of the gradient"),
        ("step", {"gradient_norm": float("nan")}, STEP, "norm of the gradient"),
        ("step", {"loss_after": 0.2}, STEP, "loss of the same samples, before and after"),
        ("step", {"engine_after": OLD | {"a": "3" * 16}}, REFRESH, "tensors equal on both sides after"),
        ("step", {"engine_after": NEW | {"c": "0" * 16}}, REFRESH, "tensors equal on both sides after"),
        ("step", {"engine_after": OLD, "trainer_after": OLD}, REFRESH, "tensors that the step changed"),
        ("step", {"engine_before": {"a": OLD["a"]}}, REFRESH, "tensors equal on both sides before"),
    ],
)
def test_each_check_can_fail(part: str, changes: dict[str, Any], section: str, name: str) -> None:
    parts = Parts({}, {}, {}, OLD)
    setattr(parts, part, changes)
    assert (section, name) in failed(parts)


def test_large_mismatch_fails_even_if_own_routes_are_worse() -> None:
    bad = {"own": mismatch(5.0, 3.0), "forced": mismatch(1.0, 0.8), "stale": mismatch(9.0, 9.0)}
    assert [name for _, name in failed(Parts({}, {}, bad, OLD))] == [
        "mean |Δ log-prob|, engine's routes forced",
        "KL(engine, trainer), routes forced",
    ]


def test_no_fingerprints_are_not_equal_fingerprints() -> None:
    empty: dict[str, Any] = {"engine_before": {}, "engine_after": {}, "trainer_after": {}}
    assert len(failed(Parts({}, empty, {}, {}))) == 3


@pytest.mark.parametrize(
    "message",
    [
        Progress("score", 1, 2),
        Failure("no server"),
        TrainerReport([rollout_report("0"), rollout_report("1")], [step_report()], OLD),
    ],
)
def test_messages_survive_the_pipe(message: Message) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1 and decode(line) == message


@pytest.mark.parametrize("line", [b"hello\n", b"{}\n", b'{"type":"progress","phase":"x"}\n', b'{"type":"other"}\n'])
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(line)


def test_a_dense_model_has_no_routes_and_the_same_bounds() -> None:
    dense = {"routes": None, "forced": None}
    parts = Parts(dict(dense), {}, dict(dense), OLD)
    assert failed(parts) == []
    report = TrainerReport([rollout_report("0", **dense)], [], OLD)
    assert not [row.name for row in rows_of(report) if "routes forced" in row.name or "expert" in row.name]
    parts.second["own"] = mismatch(0.2, 0.02)
    assert [name for _, name in failed(parts)] == ["mean |Δ log-prob|", "KL(engine, trainer)"]
    parts.second["own"] = mismatch(0.02, 0.002)
    parts.second["stale"] = mismatch(0.03, 0.5)
    assert [name for _, name in failed(parts)] == ["mean |Δ log-prob|, weights before the step"]
