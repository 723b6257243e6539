"""A soak of some seconds on one rank, and proof that its judge is not easily pleased.

`make soak MINUTES=60` is the real one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from rollout.families.registry import load_model_config
from tests.history.reference import MixedReference
from tests.model_zoo import logical_tensors
from tests.soak.__main__ import make_model
from tests.soak.explain import Explainer
from tests.soak.judge import JudgeProcess
from tests.soak.known import Known
from tests.soak.picture import draw
from tests.soak.play import LAYOUTS, Played, Soak, play
from tests.soak.reading import Explanation, Reading
from tests.soak.report import complaints, print_report
from tests.soak.samples import Sample, Span, Violation, samples_of
from tests.soak.wrong_variants import ENOUGH, WRONG_VARIANTS

pytestmark = pytest.mark.full

SECONDS = 12.0
MAX_KEPT = 1000
TO_CATCH = 3  # samples on which each variant must be noticed


class KeepingJudge(JudgeProcess):
    """Keeps a few samples, and all weights that were in force."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.samples: list[Sample] = []
        self.known = Known()

    def tell(self, what: str, *args: Any) -> None:
        super().tell(what, *args)
        if what == "content":
            epoch, label, path = args
            self.known.contents[epoch], self.known.labels[epoch] = load_file(path), {label}
        elif what == "label":
            self.known.labels[args[0]].add(args[1])
        elif what == "answer" and len(self.samples) < MAX_KEPT:
            self.samples += samples_of(args[0], args[1])[:4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("soak") / "model")


@pytest.fixture(scope="module")
def soaked(model: Path) -> tuple[Played, KeepingJudge]:
    judge = KeepingJudge(model)
    layout = replace(LAYOUTS["1"], clients=3, groups=(16, 24), strangers_every_s=2.0)
    return play(layout, model, SECONDS, 7, lambda _: None, lambda _: judge, across_a_refresh), judge


def across_a_refresh(soak: Soak) -> None:
    """Make samples that begin under one version and end under the next, with old KV and with new."""
    params = {"n": 4, "max_new_tokens": 300, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    for mode in ("in_place", "retract"):
        body = {"rid": mode, "input_ids": [7, 3, 9, 11, 5] * 6, "sampling_params": params, "return_logprob": True}
        body |= {"logprob_start_len": 0, "return_routed_experts": True, "routed_experts_format": "compact"}
        asking = Thread(target=soak.traffic.ask, args=(body,))
        asking.start()
        while not any(load["num_running_reqs"] for load in soak.calls.get("/v1/loads").json()["loads"]):
            assert asking.is_alive()
        soak.calls.post("/pause_generation", {"mode": mode})
        soak.trainer.not_paused("safetensors", calls=1)
        asking.join(60)


def test_a_short_soak_finds_nothing_wrong(soaked: tuple[Played, KeepingJudge], tmp_path: Path) -> None:
    played, _ = soaked
    assert complaints(played) == []
    console = Console(width=120, record=True)
    assert print_report([played], console), console.export_text()
    # Enough happened for the checks to mean something.
    assert played.tally.samples > 50 and played.tally.tokens > 300 and played.commits > 2
    assert played.tally.offered > 0 and played.tally.deceived == 0
    draw([played], tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", WRONG_VARIANTS)
def test_wrong_variants_are_caught(soaked: tuple[Played, KeepingJudge], model: Path, name: str) -> None:
    _, judge = soaked
    caught = 0
    for sample in sorted(judge.samples, key=lambda sample: len(sample.rows)):
        if len(sample.output_ids) < ENOUGH or caught == TO_CATCH:
            continue
        faulty = WRONG_VARIANTS[name](sample, judge.known)
        if faulty is None:
            continue
        (found,) = Explainer(load_model_config(model), faulty[1]).explain([faulty[0]])
        if isinstance(found, Explanation) and not found.decided:
            continue  # two experts too close behind a retraction: the judge passes nothing, and counts the sample
        assert isinstance(found, Violation), f"{name} of {sample.rid} is not noticed: {found}"
        caught += 1
    assert caught, f"no sample to which {name} applies and that can be decided"


# --- lives that retractions hide -------------------------------------------------------------------------------------


def _recomputed(model: Path, retractions: int) -> Reading:
    """Return a sample whose KV was computed again under the weights of its last tokens.

    The two versions differ in the head alone.
    """
    config, known = load_model_config(model), Known()
    known.contents[0] = logical_tensors(model)
    known.contents[1] = known.contents[0] | {"lm_head.weight": known.contents[0]["lm_head.weight"].flip(0)}
    known.labels |= {0: {"old"}, 1: {"new"}}
    reference, ids, epochs = MixedReference(config, known.contents), [3, 1, 4, 1, 5], [0] * 7 + [1] * 2
    logprobs: list[float] = []
    for position in range(4, 9):
        row = reference.forward(ids, epochs[: position + 1]).logits[-1].log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    new = Span("new", 1, 0, 5)
    sample = Sample(
        rid="r",
        prompt_ids=ids[:5],
        output_ids=ids[5:],
        logprobs=logprobs,
        prompt_logprobs=[],
        rows=reference.forward(ids[:9], epochs).routes.numpy(),
        token_spans=(Span("old", 0, 0, 3), replace(new, start=3)),
        prompt_spans=(new,),
        row_spans=(Span("old", None, 0, 7), Span("new", None, 7, 9)),
        scored_spans=(),
        oldest=Span("old", 0, 0, 1),
        finish="length",
        retractions=retractions,
        cached=0,
        seed=0,
        params={"temperature": 0.0},
        lag=0,
    )
    return Reading(reference, known, sample, epochs)


def test_old_kv_is_no_explanation_where_a_retraction_is_one(model: Path) -> None:
    reading = _recomputed(model, retractions=1)
    assert reading.explain().lives == 2
    reading = _recomputed(model, retractions=0)
    with pytest.raises(Violation, match="token 3 was sampled on KV 1 commits old"):
        reading.explain()


def test_a_life_that_fits_by_chance_is_given_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the lives from position 7 fits one position, and only a later one fits all."""
    reading = _recomputed(model, retractions=1)
    lives = list(reading._lives_from(7))
    chance, right = lives[0], lives[-3]
    assert len({tuple(reading.epochs), tuple(chance), tuple(right)}) == 3
    fits = {tuple(reading.epochs): 7, tuple(chance): 8, tuple(right): 9}
    monkeypatch.setattr(
        Reading, "_first_wrong", lambda self, output, start, life: (fits.get(tuple(life), start), "it does not fit")
    )
    assert reading._lives(0, iter([reading.epochs]), 1) == [reading.epochs[:7], right]
    assert reading._lives(0, iter([reading.epochs]), 0) is None
