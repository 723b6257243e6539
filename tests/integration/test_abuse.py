"""Hostile clients against a real server: a quick choice of `make abuse`, and broken servers that it must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.abuse import aftermath, attacks
from tests.abuse.attacks import aborts, readers, silence
from tests.abuse.good import payload, tensors_of
from tests.abuse.play import Played, Siege
from tests.abuse.prober import Sample, percentile
from tests.abuse.registry import ATTACKS, MODEL, OPEN, Attack
from tests.abuse.report import table
from tests.abuse.schema import extremes, operations
from tests.abuse.server import Victim, named_statuses
from tests.abuse.wrong_server import MODULE, WRONG
from tests.model_zoo import tiny_checkpoint

assert attacks  # importing them fills the list
QUICK = [attack for attack in ATTACKS if attack.quick]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("abuse") / "model", "moe", seed=7, **MODEL)


@pytest.fixture(scope="module")
def siege(model: Path) -> Iterator[Siege]:
    with Siege(OPEN, model) as siege:
        yield siege
        assert siege.end() == []


@pytest.fixture(scope="module")
def broken(model: Path) -> Iterator[Siege]:
    with Siege(OPEN, model, MODULE, renew=False) as siege:
        yield siege


@pytest.fixture(autouse=True)
def shared_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are not timed: /health may take seconds here; `make abuse` gives it one."""
    monkeypatch.setattr(aftermath, "HEALTH_S", 8.0)
    monkeypatch.setattr("tests.abuse.play.HEALTH_P99_S", 8.0)


@pytest.fixture
def one_second(shared_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the limits of `make abuse`."""
    monkeypatch.setattr(aftermath, "HEALTH_S", 1.0)
    monkeypatch.setattr("tests.abuse.play.HEALTH_P99_S", 1.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only shortly for what will not come."""
    monkeypatch.setattr(aftermath, "SETTLE_S", 0.5)
    monkeypatch.setattr("tests.abuse.server.CALL_S", 3.0)


@pytest.mark.full(
    but=(
        "aborts of waiting requests",
        "bytes that are no http",
        "clients that go away",
        "foreign origins and hosts",
        "a second trainer",
        "late buckets of a lost update",
    )
)
@pytest.mark.parametrize("attack", QUICK, ids=lambda attack: attack.name)
def test_quick_attacks_do_no_harm(siege: Siege, attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborts, "PAUSES", (None, "abort"))
    played = siege.play(attack)
    assert played.wrong == [], played
    assert played.seconds < attack.seconds


def test_every_attack_is_for_a_server_and_bounded() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 25
    assert all(attack.on and attack.seconds <= 200 and attack.play.__doc__ for attack in ATTACKS)


def test_extremes_reach_every_field_of_every_control_verb(siege: Siege) -> None:
    victim, _ = siege.server()
    control = {one.path: one for one in victim.operations if one.is_control}
    assert {"/abort_request", "/begin_weight_update", "/pause_generation", "/eplb_rebalance"} <= control.keys()
    for one in control.values():
        for name, schema in one.fields.items():
            values = list(extremes(schema))
            assert len(values) > 12, (one.path, name)
    assert any(value == 2**64 for value in extremes(control["/begin_weight_update"].fields["placement_epoch"]))
    assert any(value == "in_place" for value in extremes(control["/pause_generation"].fields["mode"]))


def test_a_new_endpoint_is_under_attack_by_itself() -> None:
    body = {"requestBody": {"content": {"application/json": {"schema": {"properties": {"x": {"type": "integer"}}}}}}}
    (one,) = operations({"paths": {"/new_verb": {"post": body | {"tags": ["something new"]}}}})
    assert one.is_control and list(one.fields) == ["x"]


def test_only_statuses_in_the_documentation_are_named() -> None:
    assert {502, 503} <= named_statuses() and 500 not in named_statuses()


def test_lateness_is_by_the_time_an_answer_was_due() -> None:
    samples = [Sample(number * 0.05, 0.001, None) for number in range(990)] + [Sample(50.0, 2.0, None)] * 10
    assert percentile(samples, 0.5) == 0.001 and percentile(samples, 0.99) == 2.0


# --- wrong servers -----------------------------------------------------------------------------------------------


def harmless(victim: Victim) -> str:
    """Abort a few requests that do not exist."""
    for _ in range(8):
        victim.call("POST", "/abort_request", {"rid": "nobody"}, timeout=3.0)
    return ""


def made(play: Callable[[Victim], str], **granted: Any) -> Attack:
    settings = {"keeps_mb": 48, "peak_mb": 300, "log_kb": 64, "restores": False, "quick": False, "seconds": 60.0}
    return Attack("made", play, (OPEN.name,), **settings | granted)


def played_on(broken: Siege, wrong: str, play: Callable[[Victim], str], **granted: Any) -> Played:
    """Play an attack on a server that is broken from the attack's beginning on."""

    def attack(victim: Victim) -> str:
        victim.right("POST", f"/wrong/{wrong}", {})
        return play(victim)

    played = broken.play(made(attack, **granted))
    if broken.victim is not None and broken.victim.running:
        broken.victim.right("POST", "/wrong/none", {})
    return played


@pytest.mark.full
def test_a_server_that_is_not_broken_is_not_found_wrong(broken: Siege) -> None:
    assert played_on(broken, "none", harmless).wrong == []


CAUGHT = {
    "keeps_memory": "memory: ",
    "takes_memory": "at the peak",
    "keeps_descriptors": "descriptors: ",
    "floods_the_log": "log: ",
    "logs_a_traceback": "tracebacks",
    "ends": "lockstep: error: KeyError",
    "answers_health_late": "health: ",
    "seems_stuck": "health: ",
    "stays_paused": "rest: ",
    "cannot_flush": "idle: ",
    "fails": ": 500 ",
    "refuses_in_other_words": "without the one error shape",
    "says_nothing": "ReadTimeout",
    "changes_a_token": "answer: ",
    "changes_a_logprob": "answer: ",
    "changes_the_digest": "weights: ",
}


@pytest.mark.mutant
@pytest.mark.usefixtures("impatient", "one_second")
@pytest.mark.parametrize("wrong", CAUGHT)
def test_what_is_wrong_after_an_attack_is_found(broken: Siege, wrong: str) -> None:
    found = played_on(broken, wrong, harmless, keeps_mb=100).wrong
    assert any(CAUGHT[wrong] in what for what in found), found


@pytest.mark.mutant
@pytest.mark.usefixtures("one_second")
def test_late_health_is_found_by_the_prober(broken: Siege) -> None:
    found = played_on(broken, "answers_health_late", harmless).wrong
    assert any(what.startswith("prober: ") for what in found), found


@pytest.mark.mutant
def test_other_weights_are_found(broken: Siege) -> None:
    """The attack has succeeded although no part of the server is broken."""

    def commits_noise(victim: Victim) -> str:
        name, tensor = sorted(tensors_of(victim.model).items())[0]
        body = {"serialized_named_tensors": [payload({name: torch.randn_like(tensor)})], "format": "safetensors"}
        victim.right("POST", "/update_weights_from_tensor", body)
        return ""

    found = {what.split(":")[0] for what in played_on(broken, "none", commits_noise).wrong}
    assert found == {"answer", "weights"}
    victim, _ = broken.server()
    aftermath.restore(victim)
    assert broken.play(made(harmless)).wrong == []


@pytest.mark.mutant
def test_a_file_left_behind_is_found(broken: Siege) -> None:
    assert broken.play(made(harmless)).wrong == []
    assert broken.victim is not None
    broken.victim.right("POST", "/wrong/leaves_a_file", {})
    broken.victim.right("GET", "/ping")
    assert broken.end() == ["left in its temporary folder: left"]


@pytest.mark.full
def test_an_attack_that_does_not_end_is_ended(broken: Siege) -> None:
    def endless(victim: Victim) -> str:
        while victim.call("GET", "/ping") is not None:
            pass
        return ""

    found = broken.play(made(endless, seconds=1.0)).wrong
    assert found[0] == "not over within 1 s" and broken.victim is None


BY_ATTACK = {
    "lets_web_pages_in": ("foreign origins and hosts", "not refused"),
    "lets_no_browser_in": ("friends are let in", "a friend with"),
    "forgets_update_ids": ("a second trainer", "update id"),
    "answers_aborts_late": ("a rendezvous master that says nothing", "while another verb waited"),
    "loses_a_token_of_aborted_samples": ("aborts of waiting requests", "completion tokens said"),
    "does_not_notice_who_is_gone": ("clients that go away", "still there"),
}


@pytest.mark.mutant
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("wrong", BY_ATTACK)
def test_what_an_attack_itself_looks_for_is_found(broken: Siege, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "ANSWERS", (b"",))
    monkeypatch.setattr(readers, "NUM_LEAVING", 100)
    monkeypatch.setattr(readers, "GONE_S", 0.5)
    name, expected = BY_ATTACK[wrong]
    (attack,) = [attack for attack in ATTACKS if attack.name == name]
    found = played_on(broken, wrong, attack.play, restores=True).wrong
    assert any(expected in what for what in found), found


def test_every_broken_server_is_played() -> None:
    assert WRONG.keys() == CAUGHT.keys() | BY_ATTACK.keys() | {"leaves_a_file"}


def test_the_table_says_what_is_wrong() -> None:
    played = [Played("a", "open", "said", ["x"], 1.0, [], 0.0, 0.0), Played("b", "open", "", [], 1.0, [], 0.0, 0.0)]
    assert list(table(played).columns[2].cells) == ["[red]WRONG[/]", "held"]
