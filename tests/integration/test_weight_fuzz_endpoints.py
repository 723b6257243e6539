"""Any body on any weight endpoint of a real engine: an answer in time, no memory beyond the caps, the same weights.

Endpoints and fields come from the running application, so none can be forgotten.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.tiers import examples
from tests.weight_bodies import Body, Endpoint, bodies, junk, weight_endpoints
from weight_sync.fingerprint import fingerprint, fingerprint_hex

STATUSES = {200, 400, 401, 404, 409, 413, 502, 503}
ANSWER_S = 8.0
MEMORY_MB = 300
# These run into their deadline for every body that is nearly right.
WAITING = {"/init_weights_update_group", "/update_weights_from_ipc"}
PROMPT = {"input_ids": [3, 1, 4, 1, 5], "return_logprob": True}
PARAMS = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}


class Engine:
    """The server under test, the log-probabilities that it must keep, and ways to bring it back to rest."""

    def __init__(self, live: Live, folder: Path) -> None:
        self.http = live.client
        self.thread: EngineThread = live.scheduler  # type: ignore[assignment]
        self.endpoints = {
            endpoint.path: endpoint for endpoint in weight_endpoints(self.http.get("/openapi.json").json())
        }
        self.tensors = logical_tensors(folder)
        self.texts = [*sorted(self.tensors)[:3], "model.norm.weight", str(folder), str(folder.parent / "elsewhere")]
        self.seen: Counter[tuple[str, int]] = Counter()
        self.expected = self.logprobs()
        self.peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def logprobs(self) -> list[Any]:
        response = self.http.post("/generate", json=PROMPT | {"sampling_params": PARAMS})
        assert response.status_code == 200, response.text
        meta = response.json()["meta_info"]
        return [entry[:2] for entry in meta["output_token_logprobs"]]

    def send(self, endpoint: Endpoint, content: bytes) -> httpx.Response:
        """Send one request, and check what must hold for any answer."""
        started = time.monotonic()
        response = self.http.request(endpoint.method, endpoint.path, content=content)
        assert time.monotonic() - started < ANSWER_S
        assert response.status_code in STATUSES, (endpoint, content[:500], response.text)
        self.seen[endpoint.path, response.status_code] += 1
        answer = response.json()
        if response.status_code != 200:
            assert answer["success"] is False and answer["error"]["message"] and answer["message"], answer
        return response

    def rest(self) -> None:
        """Bring the engine to rest: nothing open, nothing paused."""
        self.http.post("/abort_weight_update", json={"update_id": self.http.get("/weight_update").json()["update_id"]})
        assert self.http.post("/continue_generation").status_code == 200
        assert self.thread.error is None

    def settle(self) -> None:
        """Bring the engine to rest, and require that the weights are what they were."""
        self.rest()
        assert self.logprobs() == self.expected
        grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.peak_kb) / 1024
        assert grown_mb < MEMORY_MB, f"{grown_mb:.0f} MB were taken"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("fuzz")
    folder = tiny_checkpoint(root / "model", "moe", seed=5)
    before = Path.cwd()
    os.chdir(root)  # relative paths of a body end here
    try:
        with live_server(
            folder,
            engine=EngineThread,
            with_tokenizer=False,
            skip_tokenizer_init=True,
            max_total_tokens=1024,
            weight_update_timeout=0.5,
            num_threads=1,
        ) as live:
            yield Engine(live, folder)
    finally:
        os.chdir(before)


def fuzz(
    engine: Engine,
    endpoint: Endpoint,
    contents: st.SearchStrategy[bytes],
    max_examples: int,
    begin: bytes | None = None,
) -> None:
    """Fuzz an endpoint; with `begin`, within a weight update that this body opens, and that is ended afterwards."""

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(content=contents)
    def one(content: bytes) -> None:
        if begin is not None:
            engine.send(engine.endpoints["/begin_weight_update"], begin)
        engine.send(endpoint, content)
        if begin is not None:
            engine.send(engine.endpoints["/end_weight_update"], b"")
        engine.rest()

    one()
    engine.settle()


def as_json(body: Any) -> bytes:
    return json.dumps(body).encode("utf-8", "surrogatepass")


def test_every_weight_endpoint_is_under_test(engine: Engine) -> None:
    assert {
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/begin_weight_update",
        "/end_weight_update",
        "/abort_weight_update",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weight_version",
        "/get_weights_by_name",
        "/weights_checker",
    } <= engine.endpoints.keys()


@pytest.mark.full
def test_bodies_of_the_right_fields(engine: Engine) -> None:
    for path, endpoint in engine.endpoints.items():
        fuzz(engine, endpoint, bodies(endpoint.schema, engine.texts).map(as_json), 4 if path in WAITING else 15)
    accepted = {path for path, status in engine.seen if status == 200}
    refused = {path for path, status in engine.seen if status == 400}
    assert {"/begin_weight_update", "/update_weight_version", "/weights_checker", "/get_weights_by_name"} <= accepted
    without_fields = {  # that they need
        *("/abort_weight_update", "/shutdown_weight_transfer_engine", "/areal_update_weights_xccl"),
        "/drop_weight_snapshot",
    }
    assert refused >= engine.endpoints.keys() - without_fields, "every endpoint has something to refuse"


@pytest.mark.full
def test_bodies_of_any_json_and_any_bytes(engine: Engine) -> None:
    for endpoint in engine.endpoints.values():
        fuzz(engine, endpoint, junk().map(as_json) | st.binary(max_size=60), 8)


def test_no_history_of_calls_changes_the_weights(engine: Engine) -> None:
    """Right and wrong calls come in any order, and the engine does not come to rest between them."""
    calls = [endpoint for path, endpoint in engine.endpoints.items() if path not in WAITING]
    step = st.sampled_from(calls).flatmap(
        lambda endpoint: bodies(endpoint.schema, engine.texts).map(lambda body: (endpoint, as_json(body)))
    )
    pause = st.sampled_from(["/pause_generation", "/continue_generation"]).map(
        lambda path: (Endpoint("POST", path, {}), b"{}")
    )

    @settings(
        max_examples=examples(25, gate=8),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(history=st.lists(step | pause, max_size=8))
    def one(history: list[tuple[Endpoint, bytes]]) -> None:
        for endpoint, content in history:
            engine.send(endpoint, content)
        engine.settle()

    one()


def norm_of(engine: Engine) -> tuple[str, torch.Tensor, dict[str, Any]]:
    """Return the name and the content of a tensor of the model, and its entry in a manifest.

    With this manifest no other content can be committed.
    """
    name = "model.norm.weight"
    tensor = engine.tensors[name]
    meta = {"name": name, "dtype": "float32", "shape": list(tensor.shape)}
    return name, tensor, meta | {"fingerprint": fingerprint_hex(fingerprint(tensor))}


def valid_calls(engine: Engine) -> list[tuple[str, Body]]:
    """Return paths and bodies that are right, or would be right if the sender were there."""
    name, tensor, entry = norm_of(engine)
    meta = {"names": [name], "dtypes": ["float32"], "shapes": [list(tensor.shape)]}
    payload = base64.b64encode(pickle.dumps([(name, tensor)], 4)).decode()
    safetensors = base64.b64encode(save({name: tensor})).decode()
    begin = {"weight_version": "v", "coverage": "partial", "manifest": [entry], "lease_s": 5.0}
    return [
        ("/begin_weight_update", begin),
        ("/update_weights_from_distributed", meta | {"group_name": "no such group"}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [payload]}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [safetensors], "format": "safetensors"}),
        ("/update_weights_from_ipc", {"zmq_handles": {"cpu": "tcp://127.0.0.1:1"}}),
        ("/update_weight_version", {"new_version": "v2"}),
        ("/weights_checker", {"action": "checksum"}),
    ]


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    """Change, drop or repeat bytes at one to three places, or cut off the end."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.sampled_from(["change", "drop", "repeat", "cut"]))
        if kind == "change":
            data[at] = draw(st.integers(0, 255))
        elif kind == "drop" and len(data) > 1:
            del data[at]
        elif kind == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 16))]
        elif kind == "cut":
            del data[max(at, 1) :]
    return bytes(data)


@pytest.mark.full
def test_right_bodies_with_wrong_bytes(engine: Engine) -> None:
    """Mutated bodies commit no other content under a manifest with a fingerprint, whatever the mutation."""
    entry = norm_of(engine)[2]
    begin = as_json({"coverage": "partial", "manifest": [entry]})
    for path, body in valid_calls(engine):
        if path not in engine.endpoints:
            continue

        fuzz(engine, engine.endpoints[path], mutated(as_json(body)), 15, begin=None if "begin" in path else begin)


def test_announced_sizes_take_no_memory(engine: Engine) -> None:
    """A body of a hundred bytes that announces terabytes takes no memory."""
    names = sorted(engine.tensors)[:2]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in (2**31, 2**38, 2**45, 2**62):
        engine.http.post("/begin_weight_update", json={})
        metas = {"names": names, "dtypes": ["float32"] * 2, "shapes": [[size], [size]]}
        for load_format in (None, "flattened_bucket"):
            assert engine.http.post(
                "/update_weights_from_distributed", json=metas | {"load_format": load_format}
            ).is_error
        entries = [{"name": name, "dtype": "float32", "shape": [size]} for name in names]
        engine.http.post("/abort_weight_update")
        assert engine.http.post("/begin_weight_update", json={"manifest": entries}).status_code == 400
        reply = engine.http.post("/get_weights_by_name", json={"name": names[0], "truncate_size": 2**31 - 1})
        assert reply.status_code == 200
    engine.settle()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 100


def test_a_body_over_the_cap_is_refused(engine: Engine) -> None:
    content = b'{"names": ["' + b"x" * (64 << 20) + b'"]}'
    assert engine.send(engine.endpoints["/update_weights_from_distributed"], content).status_code == 413
    engine.settle()


@pytest.mark.mutant
def test_the_check_of_the_weights_can_fail(engine: Engine) -> None:
    """The check sees one wrong element of one tensor, and passes again when the element is restored."""
    assert engine.thread.scheduler is not None
    weights = engine.thread.scheduler.runner.state.model.weights
    name, tensor, _ = norm_of(engine)
    weights.write(name, tensor * 1.5)
    with pytest.raises(AssertionError):
        engine.settle()
    weights.write(name, tensor)
    engine.http.post("/flush_cache")
    engine.settle()
