"""`whole_update` of a bucket: the three verbs that the scheduler gets, and which of their answers is the call's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.messages import weights as verbs
from rollout.core.messages.message import ControlReqInput, ControlReqOutput, failure
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder
from weight_sync.errors import TransactionStateError

BEGIN, BUCKET, END = (
    verbs.BeginWeightUpdateReqInput,
    verbs.UpdateWeightsFromDistributedReqInput,
    verbs.EndWeightUpdateReqInput,
)
LISTS = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]]}
WHOLE = {"coverage": "partial", "fingerprints": "0" * 16, "prepared_s": 1.5}
BODY = LISTS | {"group_name": "g", "update_id": "u", "weight_version": "7", "cast": True, "whole_update": WHOLE}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(folder, dtype="float32") as server:
        yield server


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    shared.scheduler.received.clear()
    yield shared
    shared.scheduler.answers.clear()


def call(live: Live, **changes: Any) -> tuple[int, dict[str, Any]]:
    reply = live.client.post("/update_weights_from_distributed", json=BODY | changes)
    return reply.status_code, reply.json()


def received(live: Live) -> list[Any]:
    return [message for message in live.scheduler.received if isinstance(message, ControlReqInput)]


def refusing(message: str) -> Callable[[ControlReqInput[Any]], ControlReqOutput[Any]]:
    return lambda verb: failure(verb.request_id, TransactionStateError(message))


def test_begin_bucket_and_end_leave_in_this_order(live: Live) -> None:
    committed = {"weight_version": "7", "weight_epoch": 3, "num_tensors": 1}
    live.scheduler.answers[END] = lambda verb: ControlReqOutput(
        request_id=verb.request_id, success=True, message="in force", data=dict(committed)
    )
    for _ in range(2):  # the lists are known the second time
        live.scheduler.received.clear()
        status, answer = call(live)
        assert status == 200 and answer == committed | {"success": True, "message": "in force"}
        begin, bucket, end = received(live)
        assert (type(begin), type(bucket), type(end)) == (BEGIN, BUCKET, END)
        assert {begin.update_id, bucket.update_id, end.update_id} == {"u"}
        assert (begin.weight_version, begin.coverage, begin.cast, begin.prepared_s) == ("7", "partial", True, 1.5)
        assert begin.lists()[:3] == (["w"], ["bfloat16"], [[2, 3]]) and begin.fingerprints() == "0" * 16
        assert begin.digest() == bucket.digest(), "the engine plans lists once"
        assert bucket.group_name == "g" and bucket.lists()[:3] == begin.lists()[:3]
        assert end.phase is None and end.deadline > bucket.deadline


def test_lists_that_are_not_usual_are_a_manifest_too(live: Live) -> None:
    """They are read as values, and not passed on as JSON."""
    status, _ = call(live, shapes=[[2.0, 3]])
    begin, bucket, _ = received(live)
    assert status == 200 and begin.lists()[2] == bucket.lists()[2] == [[2, 3]]


def test_without_fingerprints_there_is_no_manifest_and_without_an_id_one_is_made(live: Live) -> None:
    status, _ = call(live, whole_update={}, update_id=None)
    begin, bucket, end = received(live)
    assert status == 200 and not begin.has_manifest and begin.coverage == "full"
    assert begin.update_id and begin.update_id == bucket.update_id == end.update_id


@pytest.mark.parametrize("refused", [BEGIN, BUCKET, END])
def test_the_first_refusal_is_the_answer_and_the_other_verbs_leave_all_the_same(live: Live, refused: type) -> None:
    kinds = [BEGIN, BUCKET, END]
    for kind in kinds[kinds.index(refused) :]:
        live.scheduler.answers[kind] = refusing(f"no {kind.__name__}")
    status, answer = call(live)
    assert status == 409 and answer["message"] == f"no {refused.__name__}" and not answer["success"]
    assert [type(verb) for verb in received(live)] == kinds


@pytest.mark.parametrize(("version", "status"), [("7", 200), (None, 200), ("8", 409)])
def test_a_call_that_comes_again_after_its_commit_is_answered_as_before(
    live: Live, version: str | None, status: int
) -> None:
    """The id of an update of another version is not taken for a repetition."""
    for kind in (BEGIN, BUCKET):
        live.scheduler.answers[kind] = refusing("the weight update 'u' is committed, not open")
    live.scheduler.answers[END] = lambda verb: ControlReqOutput(
        request_id=verb.request_id, success=True, message="in force", data={"weight_version": "7", "weight_epoch": 3}
    )
    found, answer = call(live, weight_version=version)
    assert found == status
    assert answer["message"] == ("in force" if status == 200 else "the weight update 'u' is committed, not open")


@pytest.mark.parametrize(
    "whole", [{"coverage": "some"}, {"coverage": "partial"}, {"fingerprints": 7}, {"prepared_s": -1}, "yes"]
)
def test_fields_that_cannot_be_read_refuse_the_bucket(live: Live, whole: Any) -> None:
    status, answer = call(live, whole_update=whole)
    assert status == 400 and "whole_update" in answer["message"]
    (message,) = received(live)
    assert isinstance(message, verbs.RefusedBucketReqInput) and message.group_name == "g"


def test_an_unknown_field_is_named(live: Live) -> None:
    status, answer = call(live, whole_update=WHOLE | {"coverages": 1})
    assert status == 200 and answer["ignored_fields"] == ["whole_update.coverages"]
