"""The parts that follow from the declaration of a control verb: body, handler, merged replies."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.messages.io_struct import VERBS, PauseGenerationReqInput, PauseReply
from rollout.core.messages.message import ControlReqInput, Reply, body_fields, reply_type
from rollout.core.messages.profile import StartProfileReqInput
from rollout.core.messages.weights import BeginWeightUpdateReqInput, UpdateWeightsFromDiskReqInput
from rollout.http.control.body import body_of, fields_of
from rollout.http.io import parse_body
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness


def fields(verb: type[ControlReqInput], body: bytes) -> dict[str, Any]:
    return fields_of(verb, parse_body(body_of(verb), body))


def test_every_verb_has_a_handler_a_reply_and_paths_of_its_own(tmp_path: Path) -> None:
    harness = Harness(tiny_checkpoint(tmp_path / "model", "moe"))
    assert set(VERBS) <= harness.scheduler._verbs.keys()
    assert all(issubclass(reply_type(verb), Reply) for verb in VERBS)
    routes = Counter(
        (method, path)
        for verb in VERBS
        if verb.endpoint.path is not None
        for method in verb.endpoint.methods
        for path in (verb.endpoint.path, *verb.endpoint.aliases)
    )
    assert len(routes) > 30 and max(routes.values()) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_no_body_reaches_what_is_hidden(verb: type[ControlReqInput]) -> None:
    names = {item.name for item in body_fields(verb)}
    hidden = {"request_id", "deadline", *verb.endpoint.hidden}
    assert not hidden & names and not hidden & body_of(verb).model_fields.keys()
    assert verb.endpoint.hidden <= set(verb.__struct_fields__)
    assert set(verb.endpoint.other_names.values()) <= names


def test_a_body_becomes_the_fields_of_its_verb() -> None:
    assert fields(PauseGenerationReqInput, b'{"mode": "wait", "wait_s": 1, "unknown": 2}') == {"mode": "wait"}
    assert fields(StartProfileReqInput, b'{"max_iterations": "3"}')["num_steps"] == 3
    assert fields(StartProfileReqInput, b'{"max_iterations": 3, "num_steps": 4}')["num_steps"] == 4
    body = b'{"manifest": [{"name": "w", "dtype": "float32", "shape": [2], "extra": 1}], "lease_s": null}'
    [entry] = fields(BeginWeightUpdateReqInput, body)["manifest"]
    assert (entry.name, entry.shape, entry.fingerprint) == ("w", [2], None)
    disk = fields(UpdateWeightsFromDiskReqInput, b'{"model_path": "/m", "flush_cache": false, "is_async": true}')
    assert disk["model_path"] == "/m" and not disk.keys() & {"flush_cache", "is_async"}
    for wrong in (b'{"model_path": ""}', b'{"model_path": "/m", "selector": "drafts"}', b"{}"):
        with pytest.raises(BadRequest):
            fields(UpdateWeightsFromDiskReqInput, wrong)
    with pytest.raises(UnsupportedFeature, match="start_step"):
        fields(StartProfileReqInput, b'{"start_step": 2}')


def test_replies_of_ranks_are_merged_as_their_fields_say() -> None:
    one = PauseReply(paused=False, mode="abort", num_running=1, num_waiting=2, num_aborted=0)
    two = PauseReply(paused=True, mode="abort", num_running=3, num_waiting=0, num_aborted=1)
    merged = one.merged([one, two])
    assert (merged.paused, merged.num_running, merged.num_waiting, merged.num_aborted) == (True, 4, 2, 1)
    assert merged.of_ranks == [one, two] and one.of_ranks == [one]
