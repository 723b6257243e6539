"""The checks of examples/fleet: a good run passes them, and each wrong variant is noticed."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capture.codec import decode_compact
from capture.routed_experts import concat
from examples.fleet import check, run
from examples.fleet.errors import FleetError
from examples.fleet.events import (
    AT_VERSION,
    COMMITTED,
    FAILED,
    FIRST_SAMPLE,
    KILLED,
    NOTICED,
    REGISTERED,
    STARTED,
    Event,
)
from examples.fleet.reference import score_again
from examples.fleet.sample import Prompt, Sample, Span, parse_sample
from rollout.client import RouteLayout
from rollout.server.engine import Engine
from tests.model_zoo import logical_tensors, tiny_checkpoint
from weight_sync.delta.local_checkpoint import pull
from weight_sync.delta.publisher import publish_bytes

TOKENS, CUT = 12, 5
PROMPT = Prompt(7, (5, 9, 2, 11), TOKENS)


class Weights:
    """A checkpoint, two versions published on top of it, and an engine of each that samples."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = tiny_checkpoint(folder / "checkpoint")
        self.published = folder / "published"
        self._folder = folder
        tensors = [logical_tensors(self.checkpoint)]
        for version in (1, 2):
            torch.manual_seed(version)
            tensors.append({name: t + 0.05 * torch.randn_like(t) for name, t in tensors[-1].items()})
            publish_bytes(self.published, version, tensors[-2], tensors[-1])

    def sample(self, version: int, before: Sample | None = None, tokens: int = TOKENS, **fields: Any) -> Sample:
        """Generate a sample of this version, or the rest of an interrupted one, as a fleet would get it."""
        weights = self._folder / f"engine-{version}"
        pull(weights, self.checkpoint, self.published, version, timeout_s=10)
        engine = Engine(
            model_path=str(weights), enable_return_routed_experts=True, skip_tokenizer_init=True, num_threads=1,
            max_total_tokens=1000,
        )  # fmt: skip
        had = [] if before is None else before.output_ids
        answer = engine.generate(
            input_ids=[*PROMPT.token_ids, *had],
            sampling_params={"max_new_tokens": tokens - len(had), "sampling_seed": 3, "ignore_eos": True},
            return_logprob=True,
            return_routed_experts=True,
            routed_experts_format="compact",
        )
        engine.close()
        assert isinstance(answer, dict)
        meta = answer["meta_info"]
        routed = replace(decode_compact(base64.b64decode(meta["routed_experts"])), weight_versions=())
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        spans = [Span(version, len(had), tokens)]
        if before is not None:
            kept = before.routed_experts
            routed = concat([kept, routed.rows(len(kept), len(routed))])
            logprobs, spans = before.logprobs + logprobs, before.spans + spans
        known = {"engine": "engine-1", "asked_at_version": spans[0].version} | fields
        return Sample(PROMPT, had + answer["output_ids"], logprobs, routed, spans, **known)

    def rescore(self, *samples: Sample) -> check.Rescoring:
        again = self._folder / "again"
        return check.rescore(
            score_again(samples, [0, 1, 2], self.checkpoint, self.published, again, lambda done, total: None)
        )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def whole(weights: Weights) -> Sample:
    return weights.sample(1)


@pytest.fixture(scope="module")
def crossing(weights: Weights) -> Sample:
    """Its first tokens are of version 1, the others of version 2."""
    return weights.sample(2, before=weights.sample(1, tokens=CUT))


def test_good_samples_pass_the_checks_of_the_fleet(weights: Weights, whole: Sample, crossing: Sample) -> None:
    for sample in (whole, crossing):
        assert [*check.malformed(sample), *check.outdated(sample, [0, 1, 2])] == []
    result = weights.rescore(whole, crossing)
    assert (result.spans, result.tokens, result.mixed) == (3, 2 * TOKENS, [])
    assert result.distinct == result.comparable == 2 * TOKENS


@pytest.mark.parametrize(
    "spans",
    [
        [Span(1, 0, TOKENS)],
        [Span(2, 0, TOKENS)],
        [Span(1, 0, CUT + 1), Span(2, CUT + 1, TOKENS)],
        [Span(1, 0, CUT - 1), Span(2, CUT - 1, TOKENS)],
        [Span(0, 0, CUT), Span(2, CUT, TOKENS)],
    ],
)
def test_a_mixed_sample_is_noticed(weights: Weights, crossing: Sample, spans: list[Span]) -> None:
    """A sample names versions that did not make its tokens, for one token or for all."""
    result = weights.rescore(replace(crossing, spans=spans))
    assert result.mixed and "sample 7 of engine-1" in result.mixed[0]


def test_a_token_that_was_not_sampled_is_noticed(weights: Weights) -> None:
    """The tokens after it no longer have the recorded numbers."""
    wrong = weights.sample(2, before=weights.sample(1, tokens=CUT))
    wrong.output_ids[1] = (wrong.output_ids[1] + 1) % 100
    assert weights.rescore(wrong).mixed


def test_routes_of_another_version_are_noticed(weights: Weights, whole: Sample) -> None:
    ids = whole.routed_experts.logical_ids_TLK.copy()
    ids[-1, 0] = ids[-1, 0][::-1]
    wrong = replace(whole, routed_experts=replace(whole.routed_experts, logical_ids_TLK=ids))
    assert weights.rescore(wrong).mixed == ["sample 7 of engine-1, tokens 0 to 12: other experts than version 1 gives"]


def test_a_lost_sample_is_noticed(whole: Sample) -> None:
    assert check.lost([7], [whole]) == []
    assert check.lost([7, 8], [whole]) == ["sample 8: 0 answers"]
    assert check.lost([7], [whole, whole]) == ["sample 7: 2 answers"]
    assert check.lost([], [whole]) == ["sample 7: 1 answers"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: {"output_ids": s.output_ids[:-1]}, "11 tokens and 12 log-probabilities"),
        (lambda s: {"logprobs": s.logprobs[:-1]}, "12 tokens and 11 log-probabilities"),
        (lambda s: {"logprobs": [float("nan"), *s.logprobs[1:]]}, "log-probabilities that are none"),
        (lambda s: {"routed_experts": s.routed_experts.rows(0, 14)}, "14 rows of experts, 15 expected"),
        (lambda s: {"spans": [Span(1, 0, 11)]}, "do not cover"),
        (lambda s: {"spans": [Span(1, 0, 5), Span(2, 6, 12)]}, "do not cover"),
        (lambda s: {"spans": [Span(1, 0, 7), Span(2, 6, 12)]}, "do not cover"),
        (lambda s: {"spans": [Span(1, 0, 12), Span(2, 12, 12)]}, "do not cover"),
        (lambda s: {"spans": []}, "do not cover"),
        (lambda s: {"output_ids": [], "logprobs": [], "spans": []}, "0 tokens"),
        (lambda s: {"prompt": replace(PROMPT, max_tokens=11)}, "12 tokens, 11 at most"),
    ],
)
def test_what_does_not_fit_is_noticed(whole: Sample, change: Callable[[Sample], dict[str, Any]], said: str) -> None:
    assert said in "; ".join(check.malformed(replace(whole, **change(whole))))


def test_a_version_that_is_not_in_force_is_noticed(whole: Sample, crossing: Sample) -> None:
    assert "never committed" in "; ".join(check.outdated(whole, [0, 2]))
    assert "sent at version 2, sampled by [1]" in "; ".join(check.outdated(replace(whole, asked_at_version=2), [1, 2]))
    backwards = replace(crossing, spans=[Span(2, 0, CUT), Span(1, CUT, TOKENS)])
    assert "sampled by [2, 1]" in "; ".join(check.outdated(backwards, [1, 2]))


HISTORY = [
    Event(1, STARTED, "engine-0"),
    Event(1, STARTED, "engine-1"),
    Event(2, COMMITTED, "engine-0, engine-1", 1),
    Event(3, KILLED, "engine-0", 1),
    Event(4, NOTICED, "engine-0", 1),
    Event(5, STARTED, "engine-2"),
    Event(6, COMMITTED, "engine-1", 2),
    Event(7, AT_VERSION, "engine-2", 2),
    Event(8, REGISTERED, "engine-2", 2),
    Event(9, FIRST_SAMPLE, "engine-2", 2),
    Event(10, COMMITTED, "engine-1, engine-2", 3),
]


def later(whole: Sample) -> list[Sample]:
    """Return the replacement's samples before and after the release that it took part in."""
    return [replace(whole, engine="engine-2", spans=[Span(version, 0, TOKENS)]) for version in (2, 3)]


def test_a_good_replacement_passes(whole: Sample) -> None:
    assert check.unreplaced(HISTORY, later(whole)) == []
    came_second = [*HISTORY[:5], Event(5, STARTED, "engine-9"), Event(5, FAILED, "engine-9"), *HISTORY[5:]]
    assert check.unreplaced(came_second, later(whole)) == []
    alone = [replace(event, engine="engine-2") if event.seconds == 10 else event for event in HISTORY]
    assert check.unreplaced(alone, later(whole)) == []
    at_once = [event for event in HISTORY if event.seconds != 6]
    as_killed = [replace(event, version=1) if 7 <= event.seconds <= 9 else event for event in at_once]
    assert check.unreplaced(as_killed, later(whole)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({7: 1, 8: 1, 9: 1}, "was at version 1 when the router got to know it, not at 2"),
        ({7: 1}, "was at version 1"),
        ({9: 1}, "first sample of engine-2 has version 1, expected 2"),
        ({3: None}, "no engine was killed"),
        ({4: None}, "was not noticed"),
        ({5: None}, "engine-0 was not replaced"),
        ({7: None}, "engine-2: process started, then registered"),
        ({9: None}, "engine-2: process started, then at the current version, then registered with the router"),
    ],
)
def test_a_wrong_replacement_is_noticed(whole: Sample, change: dict[int, int | None], said: str) -> None:
    events = [
        replace(event, version=change.get(int(event.seconds), event.version))
        for event in HISTORY
        if change.get(int(event.seconds), 0) is not None
    ]
    assert said in "; ".join(check.unreplaced(events, later(whole)))


def test_a_replacement_that_the_router_knew_before_it_was_ready_is_noticed(whole: Sample) -> None:
    events = [*HISTORY[:7], HISTORY[8], HISTORY[7], *HISTORY[9:]]
    assert "then registered with the router, then at the current" in "; ".join(check.unreplaced(events, later(whole)))


def test_a_replacement_that_no_release_reaches_is_noticed(whole: Sample) -> None:
    assert "took part in no refresh after version 2" in "; ".join(check.unreplaced(HISTORY, later(whole)[:1]))


def answer() -> dict[str, Any]:
    """Return an answer of the fleet's engine: 3 prompt tokens, 2 more, of 2 layers the second one with experts."""
    rows = np.zeros((4, 2, 2), dtype=np.uint8)
    rows[:, 1] = [0, 3]
    file = io.BytesIO()
    np.save(file, rows)
    choice = {
        "token_ids": [4, 5],
        "finish_reason": "length",
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}]},
        "routed_experts": base64.b64encode(file.getvalue()).decode(),
        "weight_versions": [{"version": "2", "start": 0, "end": 2}],
    }
    return {"model": "engine-0", "choices": [choice]}


LAYOUT = RouteLayout(num_hidden_layers=2, top_k=2, moe_layer_ids=(1,), num_experts=4)


def test_an_answer_is_read() -> None:
    sample = parse_sample(answer(), Prompt(1, (1, 2, 3), 2), LAYOUT, 2, 1)
    assert sample is not None and [*check.malformed(sample), *check.outdated(sample, [2])] == []
    given_up = answer()
    given_up["choices"][0]["finish_reason"] = "abort"
    assert parse_sample(given_up, Prompt(1, (1, 2, 3), 2), LAYOUT, 2, 1) is None


@pytest.mark.parametrize(
    "change",
    [
        {"routed_experts": None},
        {"routed_experts": "AAAA"},
        {"routed_experts": "no base64"},
        {"logprobs": None},
        {"weight_versions": [{"version": "2~1of7", "start": 0, "end": 2}]},
        {"token_ids": None},
    ],
)
def test_a_malformed_answer_is_refused(change: dict[str, Any]) -> None:
    wrong = answer()
    wrong["choices"][0] |= change
    with pytest.raises(FleetError, match="sample 1: malformed answer"):
        parse_sample(wrong, Prompt(1, (1, 2, 3), 2), LAYOUT, 2, 1)


def test_a_check_that_fails_fails_the_run(whole: Sample) -> None:
    record = run.Record([7, 8], 1, [whole], [0, 1, 2], HISTORY, [0, 0])
    rows = {row.name: row for row in run.rows_of(record, check.Rescoring(1, 12, ["sample 7"], 12, 12))}
    assert {name for name, row in rows.items() if row.ok is False} == {
        "lost, or answered twice",
        "mixed: other bits than their version gives",
        "wrong with the replacement",
    }
    assert rows["lost, or answered twice"].value == "1: sample 8: 0 answers"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "1"], "must be in 6..3600"),
        (["--seconds", "soon"], "invalid number value: 'soon'"),
        (["--seconds", "nan"], "must be in 6..3600"),
        (["--engines", "1"], "must be in 2..8"),
        (["--in-flight", "4"], "must be in 8..256"),
        (["--release-every", "30"], "at most a third of --seconds"),
        (["--events", "/nowhere/events.json"], "there is no folder /nowhere"),
        (["--router", "none"], "unrecognized arguments"),
    ],
)
def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main(words)
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_missing_packages_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "NEEDED", {"no_such_module": "no-such-package"})
    assert run.main([]) == 1
    assert capsys.readouterr().out == "fleet: error: no-such-package not installed here: run `make example-fleet`\n"


def test_a_work_folder_with_something_in_it_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "NEEDED", {})
    (tmp_path / "file").touch()
    assert run.main(["--workdir", str(tmp_path)]) == 1
    assert "is not an empty folder" in capsys.readouterr().out
