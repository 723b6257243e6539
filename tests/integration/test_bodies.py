"""Mutated bodies against a real server, a part of `make nightly`, and broken servers that they must find."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.abuse.registry import MODEL
from tests.abuse.server import Victim
from tests.abuse.wrong_server import MODULE
from tests.bodies.mutate import mutated
from tests.bodies.run import SETUP, Bodies, play
from tests.bodies.seeds import EXCLUDED, seeds, structured, unseeded
from tests.model_zoo import tiny_checkpoint

SEED = 1
NUM_GATE = 400
NUM_FULL = 10_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("bodies") / "model", "moe", seed=7, **MODEL)


@pytest.mark.parametrize("count", [NUM_GATE, pytest.param(NUM_FULL, marks=pytest.mark.full)])
def test_mutated_bodies_do_no_harm(model: Path, count: int) -> None:
    found = play(model, SEED, range(count))
    assert found.wrong == [] and found.sent == count
    assert found.statuses[200] and found.statuses[400] > found.sent / 4, "bodies are neither all right nor all alike"


def test_every_structured_field_is_seeded_and_mutated(model: Path) -> None:
    """A new endpoint or field fails here until `tests/bodies/seeds.py` fills it."""
    victim = Victim(SETUP, model)
    try:
        assert unseeded(victim, seeds(victim)) == []
        bodies = Bodies(victim, SEED)
        wanted = {(one.path, name) for one in victim.operations for name in structured(one) if one.path not in EXCLUDED}
        good = {one.path: seeds(victim)[one.path] for one in victim.operations if one.schema}
        for number in range(40000):
            if not wanted:
                break
            one, content = bodies.make(number)
            assert bodies.make(number) == (one, content), "a number names one body"
            body = json.loads(content)
            if isinstance(body, dict):
                wanted -= {
                    (one.path, name)
                    for name in structured(one)
                    if all(json.dumps(body.get(name)) != json.dumps(each.get(name)) for each in good[one.path])
                }
        assert wanted == set()
    finally:
        victim.close()


def test_mutations_do_not_touch_the_good_body() -> None:
    good = {
        "messages": [{"role": "user", "content": "a"}],
        "n": 2,
        "temperature": 0.5,
        "data": "AAAAAAAAAAAAAAAAAAAAAAAA",
    }
    before = json.dumps(good)
    changed = [mutated(random.Random(number), good, ["messages", "data"]) for number in range(5000)]
    assert json.dumps(good) == before
    assert sum(json.dumps(each) != before for each in changed) > 4500


CAUGHT = {
    "fails": ": 500 ",
    "refuses_in_other_words": "without the one error shape",
    "ends": "the server ended",
    "changes_a_token": "another answer",
    "keeps_memory": "memory grew",
}


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", CAUGHT)
def test_a_broken_server_is_noticed(model: Path, wrong: str) -> None:
    found = play(
        model,
        SEED,
        range(600),
        slice_len=100,
        module=MODULE,
        prepare=lambda victim: victim.right("POST", f"/wrong/{wrong}", {}),
    )
    assert any(CAUGHT[wrong] in each for each in found.wrong), found.wrong[:10]
