"""POST /update_weights_from_tensor: what reaches the scheduler, what is refused before, and what the clients send."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.client import AsyncRolloutClient, RolloutClient
from rollout.client.errors import ServerError
from rollout.core.messages.weights import UpdateWeightsFromTensorReqInput
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

PATH = "/update_weights_from_tensor"
CAP = 3000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(folder, dtype="float32", max_payload_bytes=CAP) as server:
        yield server


@pytest.fixture
def live(shared: Live) -> Live:
    shared.scheduler.received.clear()
    return shared


def encoded(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


def sent(live: Live) -> UpdateWeightsFromTensorReqInput:
    (verb,) = live.sent(UpdateWeightsFromTensorReqInput)
    return verb


@pytest.mark.parametrize("size", [0, 1, 2, 3, CAP - 1, CAP])
def test_the_payload_reaches_the_scheduler_as_bytes(live: Live, size: int) -> None:
    payload = bytes(number % 251 for number in range(size))
    reply = live.client.post(
        PATH,
        json={
            "serialized_named_tensors": [encoded(payload)],
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": "7",
            "abort_all_requests": True,
            "disable_draft_model": None,
        },
    )
    assert reply.status_code == 200 and reply.json()["success"]
    verb = sent(live)
    assert isinstance(verb.payload, bytearray) and bytes(verb.payload) == payload
    assert (verb.load_format, verb.format, verb.weight_version) == ("flattened_bucket", None, "7")
    assert (verb.abort_all_requests, verb.shm_name) == (True, None)


def test_shared_memory_by_name(live: Live) -> None:
    body = {"format": "safetensors", "shm_name": "psm_1", "shm_bytes": 2**40, "shm_unlink": True}
    assert live.client.post(PATH, json=body).status_code == 200
    verb = sent(live)
    assert (verb.payload, verb.shm_name, verb.shm_bytes, verb.shm_unlink) == (None, "psm_1", 2**40, True)


ONE = [encoded(b"payload")]
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "nothing": ({}, 400, "give serialized_named_tensors or shm_name"),
    "no rank": ({"serialized_named_tensors": []}, 400, "has 0 payloads; this engine has 1 ranks"),
    "two ranks": ({"serialized_named_tensors": ONE * 2}, 400, "has 2 payloads; this engine has 1 ranks"),
    "not a list": ({"serialized_named_tensors": ONE[0]}, 400, "serialized_named_tensors"),
    "not text": ({"serialized_named_tensors": [7]}, 400, "serialized_named_tensors"),
    "not base64": ({"serialized_named_tensors": ["!!!!"]}, 400, "is not base64"),
    "base64 with a line break": ({"serialized_named_tensors": [ONE[0] + "\n"]}, 400, "is not base64"),
    "base64 that is cut": ({"serialized_named_tensors": [ONE[0][:-1]]}, 400, "is not base64"),
    "base64 of another alphabet": ({"serialized_named_tensors": ["é" * 4]}, 400, "is not base64"),
    "a byte too many": ({"serialized_named_tensors": [encoded(bytes(CAP + 1))]}, 413, "--max-payload-bytes is 3000"),
    "a body too many": ({"serialized_named_tensors": ["A" * (2 << 20)]}, 413, "the limit is"),
    "an unknown format": ({"serialized_named_tensors": ONE, "format": "pickle"}, 400, "format"),
    "load_format of safetensors": (
        {"serialized_named_tensors": ONE, "format": "safetensors", "load_format": "flattened_bucket"},
        400,
        "load_format is for",
    ),
    "a segment of pickles": ({"shm_name": "psm_1", "shm_bytes": 100}, 400, "shm_name needs"),
    "a segment without a size": ({"shm_name": "psm_1", "format": "safetensors"}, 400, "shm_name needs"),
    "a segment and a payload": (
        {"shm_name": "psm_1", "shm_bytes": 9, "format": "safetensors", "serialized_named_tensors": ONE},
        400,
        "shm_name needs",
    ),
    "a size without a segment": ({"serialized_named_tensors": ONE, "shm_bytes": 9}, 400, "need shm_name"),
    "unlink without a segment": ({"serialized_named_tensors": ONE, "shm_unlink": True}, 400, "need shm_name"),
    "a negative size": ({"shm_name": "a", "shm_bytes": -1, "format": "safetensors"}, 400, "shm_bytes"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused_never_reaches_the_scheduler(live: Live, case: str) -> None:
    body, status, reason = REFUSED[case]
    reply = live.client.post(PATH, json=body)
    assert reply.status_code == status, reply.text
    assert reply.json()["success"] is False and reason in reply.json()["message"]
    assert live.sent(UpdateWeightsFromTensorReqInput) == []


def test_both_clients_send_the_content_of_tensors(live: Live) -> None:
    async def by_async_client() -> dict[str, Any]:
        async with AsyncRolloutClient(live.url) as client:
            return await client.update_weights_from_tensor([b"content"], format="safetensors", weight_version="8")

    def by_client() -> dict[str, Any]:
        with RolloutClient(live.url) as client:
            return client.update_weights_from_tensor([encoded(b"content")], format="safetensors", weight_version="8")

    for call in (lambda: asyncio.run(by_async_client()), by_client):
        assert call()["success"]
        verb = sent(live)
        assert (bytes(verb.payload or b""), verb.format, verb.weight_version) == (b"content", "safetensors", "8")
        live.scheduler.received.clear()
    with RolloutClient(live.url) as client:
        client.update_weights_from_tensor(shm_name="a", shm_bytes=9, format="safetensors", shm_unlink=True)
        assert sent(live).shm_unlink
        with pytest.raises(ServerError, match="give serialized_named_tensors or shm_name"):
            client.update_weights_from_tensor()
