"""Memory endpoints, and the fields of versions and KV, over HTTP: bodies as clients send them, replies as they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    GetStateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    TokenizedGenerateReqInput,
)
from rollout.core.messages.message import ControlReqInput
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

VERBS = {"release": ReleaseMemoryOccupationReqInput, "resume": ResumeMemoryOccupationReqInput}
VERSION_FIELDS = {
    "weight_version", "weight_versions", "weight_version_start", "weight_version_end", "prefill_weight_versions",
    "kv_weight_version_oldest", "kv_weight_epoch_oldest",
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(write_model_folder(Path(tmp_path_factory.mktemp("model")))) as server:
        yield server


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    shared.scheduler.received.clear()
    yield shared
    shared.scheduler.answers.clear()


@pytest.mark.parametrize("verb", ["release", "resume"])
@pytest.mark.parametrize(
    ("body", "tags"),
    [
        (None, None),
        ({}, None),
        ({"tags": None}, None),
        ({"tags": []}, []),
        ({"tags": ["kv_cache"]}, ["kv_cache"]),
        ({"tags": ["weights", "kv_cache", "cuda_graph"], "extra": 1}, ["weights", "kv_cache", "cuda_graph"]),
    ],
)
def test_bodies_of_clients_reach_the_scheduler(live: Live, verb: str, body: Any, tags: Any) -> None:
    reply = live.client.post(f"/{verb}_memory_occupation", json=body)
    assert reply.status_code == 200 and reply.json()["success"]
    (sent,) = live.sent(VERBS[verb])
    assert sent.tags == tags


@pytest.mark.parametrize("verb", ["release", "resume"])
def test_get_means_every_tag(live: Live, verb: str) -> None:
    assert live.client.get(f"/{verb}_memory_occupation").status_code == 200
    assert live.sent(VERBS[verb])[0].tags is None


@pytest.mark.parametrize("verb", ["release", "resume"])
@pytest.mark.parametrize("tags", [["gpu"], "weights", [3], {"weights": True}])
def test_unknown_tags_are_refused_before_the_scheduler_hears_of_them(live: Live, verb: str, tags: Any) -> None:
    status, message = live_refused(live, f"/{verb}_memory_occupation", {"tags": tags})
    assert status == 400 and "tags" in message
    assert not live.sent(VERBS[verb])


def live_refused(live: Live, path: str, body: Any) -> tuple[int, str]:
    reply = live.client.post(path, json=body)
    content = reply.json()
    assert content["success"] is False and content["message"] == content["error"]["message"]
    return reply.status_code, content["message"]


def test_state_errors_keep_their_status(live: Live) -> None:
    def refuse(verb: ControlReqInput) -> ControlReqOutput:
        return ControlReqOutput(
            request_id=verb.request_id,
            success=False,
            message="already released: weights",
            status_code=409,
            error_type="Conflict",
        )

    live.scheduler.answers[ReleaseMemoryOccupationReqInput] = refuse
    assert live_refused(live, "/release_memory_occupation", {}) == (409, "already released: weights")


def test_ready_says_why_nothing_is_served(live: Live) -> None:
    assert live.client.get("/ready").status_code == 200

    def state(verb: ControlReqInput) -> ControlReqOutput:
        data = live.scheduler._state() | {"withheld": "memory is released (weights)"}
        return ControlReqOutput(request_id=verb.request_id, success=True, data=data)

    live.scheduler.answers[GetStateReqInput] = state
    reply = live.client.get("/ready")
    assert reply.status_code == 503 and "memory is released" in reply.text
    assert live.client.get("/health").status_code == 200


@pytest.mark.parametrize(("body", "label"), [({}, None), ({"abort_below_weight_version": "7"}, "7")])
def test_continue_names_the_version_below_which_to_abort(live: Live, body: dict, label: str | None) -> None:
    assert live.client.post("/continue_generation", json=body).status_code == 200
    assert live.sent(ContinueGenerationReqInput)[0].abort_below_weight_version == label


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("lag", "sent"), [(None, None), (-1, -1), (0, 0), (3, 3)])
def test_the_lag_of_a_request_reaches_the_scheduler(live: Live, path: str, lag: int | None, sent: int | None) -> None:
    prompt: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 1}
    if path == "/generate":
        prompt = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    elif path.startswith("/v1/chat"):
        prompt = {"input_ids": [1, 2], "max_tokens": 1, "messages": []}
    assert live.client.post(path, json=prompt | {"max_kv_version_lag": lag}).status_code == 200
    assert live.sent(TokenizedGenerateReqInput)[0].max_kv_version_lag == sent


@pytest.mark.parametrize("lag", [-2, 2**31, 1.5, "many"])
def test_a_lag_that_is_none_is_refused(live: Live, lag: Any) -> None:
    status, message = live.refused(input_ids=[1], max_kv_version_lag=lag)
    assert status == 400 and "max_kv_version_lag" in message


@pytest.mark.parametrize("stream", [False, True])
def test_every_route_tells_all_that_is_known_of_versions(live: Live, stream: bool) -> None:
    """The last event of a stream has the fields that a reply without a stream has."""
    native = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}, "stream": stream}
    completion = {"prompt": [1, 2], "max_tokens": 2, "stream": stream}
    chat = {"input_ids": [1, 2], "max_tokens": 2, "stream": stream, "messages": []}
    spans = [{"version": "v0", "start": 0, "end": 2, "weight_epoch": 0}]
    want = {
        "weight_version": "v0", "weight_versions": spans, "weight_version_start": "v0", "weight_version_end": "v0",
        "prefill_weight_versions": spans, "kv_weight_version_oldest": "v0", "kv_weight_epoch_oldest": 0,
    }  # fmt: skip
    for path, body, key in (
        ("/generate", native, "meta_info"),
        ("/v1/completions", completion, "version_info"),
        ("/v1/chat/completions", chat, "version_info"),
    ):
        said = {name: value for name, value in final(live, path, body)[key].items() if name in VERSION_FIELDS}
        assert said == want, path


def final(live: Live, path: str, body: dict) -> dict[str, Any]:
    """Return the reply, or the last event of the stream."""
    reply = live.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        return reply.json()
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return json.loads(events[-2])
