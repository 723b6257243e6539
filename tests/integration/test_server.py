"""One real server: the same result in every form of request, aborts, and bad input that changes nothing."""

from __future__ import annotations

import base64
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from capture.sampling_mask import SamplingMask
from rollout.client import RolloutClient
from rollout.text.tokenizer import Tokenizer
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess
from tests.trainer_process import TrainerProcess

TEXT = "What is 12 + 30? Answer:"
PARAMS = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
CONTEXT = 16_384  # long enough for a request to be met while it runs
MOE_LAYERS, TOP_K, LAYERS = (1, 2), 3, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3, context_length=CONTEXT)


@pytest.fixture(scope="module", params=["sequential", pytest.param("overlap", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[ServerProcess]:
    settings = {"disable_overlap_schedule": request.param == "sequential"}
    with ServerProcess(folder, enable_return_routed_experts=True, max_total_tokens=70_000, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def ids(folder: Path) -> list[int]:
    backend = Tokenizer.load(folder)
    try:
        return backend._encode([TEXT], True)[0]
    finally:
        backend.close()


def generate(server: ServerProcess, **body: Any) -> Any:
    body = {"sampling_params": PARAMS, "return_logprob": True, "return_routed_experts": True} | body
    response = server.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def routes(meta: dict[str, Any]) -> np.ndarray:
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4").reshape(-1, LAYERS, TOP_K)
    assert rows.shape[0] == meta["prompt_tokens"] + meta["completion_tokens"] - 1 - meta["routed_experts_start_len"]
    return rows


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert (a["output_ids"], a["text"]) == (b["output_ids"], b["text"])
    assert np.array_equal(routes(a["meta_info"]), routes(b["meta_info"]))
    ours, theirs = (x["meta_info"]["output_token_logprobs"] for x in (a, b))
    assert np.allclose([e[0] for e in ours], [e[0] for e in theirs], atol=1e-4)


def test_text_ids_stream_and_samples_agree(server: ServerProcess, ids: list[int]) -> None:
    one = generate(server, text=TEXT)
    rows = routes(one["meta_info"])
    assert not rows[:, 0].any(), "a dense layer has zero columns"
    assert all(len(set(row)) == TOP_K for layer in MOE_LAYERS for row in rows[:, layer].tolist())
    same(generate(server, input_ids=ids), one)
    four = generate(server, text=TEXT, sampling_params=PARAMS | {"n": 4})
    assert len(four) == 4
    for sample in four:
        same(sample, one)
    batch = generate(server, text=[TEXT, "Hello"])
    same(batch[0], one)
    chunks = []
    body = {
        "text": TEXT,
        "sampling_params": PARAMS,
        "stream": True,
        "return_logprob": True,
        "return_routed_experts": True,
    }
    with server.http.stream("POST", "/generate", json=body) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [httpx.Response(200, text=line).json() for line in lines[:-1]]
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(chunks))
    same(chunks[-1], one)


def test_seeded_samples_are_the_same_alone_and_together(server: ServerProcess) -> None:
    seeded = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "sampling_seed": 11}
    alone = generate(server, text=TEXT, sampling_params=seeded)
    together = generate(
        server, text=[TEXT, "one", "two"], sampling_params=[seeded, PARAMS, seeded | {"sampling_seed": 4}]
    )
    same(together[0], alone)


def test_stop_strings_across_tokens(server: ServerProcess) -> None:
    whole = generate(server, text=TEXT)
    middle = whole["text"][len(whole["text"]) // 2 :][:3]
    stopped = generate(server, text=TEXT, sampling_params=PARAMS | {"stop": [middle]})
    assert stopped["text"] == whole["text"][: whole["text"].index(middle)]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": middle}
    kept = generate(server, text=TEXT, sampling_params=PARAMS | {"stop": [middle], "no_stop_trim": True})
    assert kept["text"].startswith(stopped["text"] + middle)
    assert kept["output_ids"] == stopped["output_ids"]


def num_requests(server: ServerProcess) -> int:
    load = server.http.get("/get_load").json()[0]
    return load["num_running_reqs"] + load["num_waiting_reqs"]


def wait_for(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def in_thread(work) -> tuple[threading.Thread, list]:
    box: list = []
    thread = threading.Thread(target=lambda: box.append(work()))
    thread.start()
    return thread, box


LONG = {"max_new_tokens": 15_000, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_sampling_masks_are_the_same_in_every_form(server: ServerProcess, ids: list[int], stream: bool) -> None:
    params = {
        "max_new_tokens": 12,
        "temperature": 1.0,
        "top_p": 0.8,
        "top_k": 40,
        "sampling_seed": 5,
        "ignore_eos": True,
    }

    def meta(**body: Any) -> dict[str, Any]:
        body = {"input_ids": ids, "sampling_params": params, "stream": stream} | body
        if not stream:
            return generate(server, **body)["meta_info"]
        with server.http.stream("POST", "/generate", json=body) as response:
            events = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        assert events
        return json.loads(events[-1])["meta_info"]

    lists = meta(return_sampling_mask=True)
    kept, logprobs = lists["output_token_sampling_mask"], lists["output_token_sampling_logprobs"]
    assert len(kept) == len(logprobs) == lists["output_token_sampling_mask_length"] == 12
    assert 1 < max(map(len, kept)) <= 40

    support = meta(return_sampling_mask=True, sampling_logprobs_mode="support")
    assert support["output_token_sampling_mask"] == kept
    output = server.http.post("/generate", json={"input_ids": ids, "sampling_params": params}).json()["output_ids"]
    places = [(token, mask.index(sampled)) for token, (mask, sampled) in enumerate(zip(kept, output))]
    assert [support["output_token_sampling_logprobs"][token][place] for token, place in places] == logprobs

    csr = meta(return_sampling_mask=True, sampling_mask_format="csr")
    assert SamplingMask.decode_csr(**csr["output_token_sampling_mask"]).to_lists() == kept
    assert csr["output_token_sampling_logprobs"] == logprobs
    slime = meta(sampling_params=params | {"custom_params": {"return_top_p_token_ids": True}})
    assert SamplingMask.decode_csr(slime["top_p_token_ids"], slime["top_p_token_offsets"]).to_lists() == kept

    with RolloutClient(server.url) as client:
        sample = client.generate(input_ids=ids, sampling_params=params, return_sampling_mask=True)
    assert sample.sampling_mask.to_lists() == kept and sample.sampling_logprobs == logprobs


def test_sampling_masks_in_other_dialects(server: ServerProcess, ids: list[int]) -> None:
    params = {"max_tokens": 6, "temperature": 1.0, "top_p": 0.8, "seed": 5, "ignore_eos": True}
    tokens = {"token_ids": ids, "sampling_params": params, "return_sampling_mask": True}
    (choice,) = server.http.post("/inference/v1/generate", json=tokens).json()["choices"]
    SamplingMask.from_lists(choice["sampling_mask"]).require(choice["token_ids"])
    with server.http.stream("POST", "/inference/v1/generate", json=tokens | {"stream": True}) as response:
        chunks = [json.loads(line[6:])["choices"] for line in response.iter_lines() if line.startswith("data: {")]
    assert [mask for (part, *_) in filter(None, chunks) for mask in part["sampling_mask"]] == choice["sampling_mask"]

    chat = {"messages": [], "input_ids": ids, "return_meta_info": True, "return_sampling_mask": True} | params
    (choice,) = server.http.post("/v1/chat/completions", json=chat).json()["choices"]
    meta = choice["meta_info"]
    sampled = [entry[1] for entry in meta["output_token_logprobs"]]
    SamplingMask.from_lists(meta["output_token_sampling_mask"]).require(sampled)
    refused = server.http.post("/v1/chat/completions", json=chat | {"return_meta_info": False})
    assert refused.status_code == 400 and "return_meta_info" in refused.text


def test_abort_by_rid_returns_what_there_is(server: ServerProcess) -> None:
    thread, box = in_thread(lambda: generate(server, text=TEXT, rid="mine", sampling_params=LONG))
    wait_for(lambda: num_requests(server) == 1)
    server.http.post("/abort_request", json={"rid": "min"})  # a prefix aborts nothing
    time.sleep(0.05)
    assert thread.is_alive()
    server.http.post("/abort_request", json={"rid": "mine"})
    thread.join(20)
    meta = box[0]["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["completion_tokens"] == len(box[0]["output_ids"]) < LONG["max_new_tokens"]
    routes(meta)
    wait_for(lambda: num_requests(server) == 0)


def test_abort_all_ends_every_running_request(server: ServerProcess) -> None:
    threads = [in_thread(lambda: generate(server, text=TEXT, sampling_params=LONG)) for _ in range(4)]
    wait_for(lambda: num_requests(server) == 4)
    server.http.post("/abort_request", json={"abort_all": True})
    for thread, box in threads:
        thread.join(20)
        assert box[0]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server: ServerProcess, stream: bool) -> None:
    with httpx.Client(base_url=server.url, timeout=0.4, trust_env=False) as client:
        try:
            with client.stream(
                "POST", "/generate", json={"text": TEXT, "sampling_params": LONG, "stream": stream}
            ) as response:
                next(response.iter_lines())
        except httpx.TimeoutException:
            pass
    wait_for(lambda: num_requests(server) == 0)


def test_a_request_that_comes_in_a_pause_waits_for_its_end(server: ServerProcess) -> None:
    paused = server.http.post("/pause_generation", json={"mode": "retract"}).json()
    assert paused["status"] == "ok" and paused["paused"] and paused["num_running"] == 0
    assert server.http.get("/ready").status_code == 503
    thread, box = in_thread(lambda: generate(server, text=TEXT))
    time.sleep(0.3)
    assert thread.is_alive(), "a request that comes while paused waits"
    assert server.http.post("/continue_generation", json={}).status_code == 200
    thread.join(20)
    assert len(box[0]["output_ids"]) == 16
    assert server.http.get("/ready").status_code == 200


# --- bad input ----------------------------------------------------------------------------------------------------

BAD_GENERATE: dict[str, dict[str, Any]] = {
    "no prompt": {},
    "empty text": {"text": ""},
    "empty ids": {"input_ids": []},
    "empty batch": {"text": []},
    "id outside the vocabulary": {"input_ids": [5, 10**6]},
    "negative id": {"input_ids": [-1]},
    "ids of a wrong type": {"input_ids": ["a"]},
    "fractional ids": {"input_ids": [1.5]},
    "text and ids": {"text": "a", "input_ids": [1]},
    "text of a wrong type": {"text": 7},
    "prompt longer than the context": {"input_ids": [1] * (CONTEXT + 1)},
    "prompt and output longer than the context": {
        "input_ids": [1] * (CONTEXT - 12),
        "sampling_params": {"max_new_tokens": 100},
    },
    "negative max_new_tokens": {"text": "a", "sampling_params": {"max_new_tokens": -1}},
    "huge max_new_tokens": {"text": "a", "sampling_params": {"max_new_tokens": 10**12}},
    "n is 0": {"text": "a", "sampling_params": {"n": 0}},
    "n is 10000": {"text": "a", "sampling_params": {"n": 10_000}},
    "wrong type in sampling": {"text": "a", "sampling_params": {"temperature": "hot"}},
    "sampling is a text": {"text": "a", "sampling_params": "greedy"},
    "logit_bias key": {"text": "a", "sampling_params": {"logit_bias": {"x": 1}}},
    "logit_bias outside": {"text": "a", "sampling_params": {"logit_bias": {"999999": 1}}},
    "stop list": {"text": "a", "sampling_params": {"stop": [1, 2]}},
    "empty stop": {"text": "a", "sampling_params": {"stop": [""]}},
    "start_len below": {"text": "a", "return_routed_experts": True, "routed_experts_start_len": -1},
    "start_len above": {"input_ids": [1, 2], "return_routed_experts": True, "routed_experts_start_len": 3},
    "logprob_start_len above": {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 9},
    "duplicate rids": {"input_ids": [[1], [2]], "rid": ["same", "same"]},
    "rid list too short": {"input_ids": [[1], [2]], "rid": ["one"]},
    "huge top_logprobs": {"text": "a", "return_logprob": True, "top_logprobs_num": 10**9},
}
META = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[48]], "group_name": "nobody"}
BAD_CONTROL: dict[str, tuple[str, dict[str, Any], int]] = {
    "unknown group": ("/update_weights_from_distributed", META, 404),
    "lists of different length": ("/update_weights_from_distributed", META | {"shapes": []}, 400),
    "negative size": ("/update_weights_from_distributed", META | {"shapes": [[-1]]}, 400),
    "unknown dtype": ("/update_weights_from_distributed", META | {"dtypes": ["float7"]}, 400),
    "names missing": ("/update_weights_from_distributed", {"dtypes": [], "shapes": []}, 400),
    "unknown load_format": ("/update_weights_from_distributed", META | {"load_format": "zip"}, 400),
    "destroy unknown group": ("/destroy_weights_update_group", {"group_name": "nobody"}, 404),
    "end without begin": ("/end_weight_update", {}, 409),
    "abort without begin": ("/abort_weight_update", {}, 409),
    "manifest with an unknown name": (
        "/begin_weight_update", {"manifest": [{"name": "x", "dtype": "float32", "shape": [1]}]}, 400),
    "manifest with a wrong shape": (
        "/begin_weight_update",
        {"coverage": "partial", "manifest": [{"name": "model.norm.weight", "dtype": "float32", "shape": [1]}]}, 400),
    "manifest with a wrong dtype": (
        "/begin_weight_update",
        {"coverage": "partial", "manifest": [{"name": "model.norm.weight", "dtype": "float64", "shape": [48]}]}, 400),
    "manifest that is not complete": (
        "/begin_weight_update", {"manifest": [{"name": "model.norm.weight", "dtype": "float32", "shape": [48]}]}, 400),
    "unknown coverage": ("/begin_weight_update", {"coverage": "some"}, 400),
    "unknown pause mode": ("/pause_generation", {"mode": "sleep"}, 400),
    "unknown tensor": ("/get_weights_by_name", {"name": "no.such"}, 404),
    "bad port": (
        "/init_weights_update_group",
        {"master_address": "127.0.0.1", "master_port": 0, "rank_offset": 1, "world_size": 2}, 400),
    "bad rank": (
        "/init_weights_update_group",
        {"master_address": "127.0.0.1", "master_port": 29999, "rank_offset": 5, "world_size": 2}, 400),
    "bad backend": (
        "/init_weights_update_group",
        {"master_address": "127.0.0.1", "master_port": 29999, "rank_offset": 1, "world_size": 2, "backend": "tcp"},
        400),
}  # fmt: skip


def fingerprints(server: ServerProcess) -> dict[str, str]:
    return server.client.weights_checker("checksum")["checksums"]


@pytest.fixture(scope="module")
def reference(server: ServerProcess) -> tuple[dict[str, str], Any]:
    return fingerprints(server), generate(server, text=TEXT)


@pytest.mark.parametrize("case", list(BAD_GENERATE))
def test_bad_generate_is_refused(server: ServerProcess, case: str) -> None:
    response = server.http.post("/generate", json=BAD_GENERATE[case])
    assert response.status_code == 400, (response.status_code, response.text)
    assert len(response.json()["error"]["message"]) > 10


@pytest.mark.parametrize("case", list(BAD_CONTROL))
def test_bad_control_is_refused(server: ServerProcess, reference, case: str) -> None:
    path, body, status = BAD_CONTROL[case]
    response = server.http.post(path, json=body)
    assert response.status_code == status, (response.status_code, response.text)
    content = response.json()
    assert content["success"] is False and len(content["message"]) > 10


def test_not_json_is_refused(server: ServerProcess) -> None:
    for path in ("/generate", "/begin_weight_update", "/v1/completions"):
        response = server.http.post(path, content=b"{", headers={"content-type": "application/json"})
        assert response.status_code == 400


def test_duplicate_rid_in_flight(server: ServerProcess) -> None:
    thread, _ = in_thread(lambda: generate(server, text=TEXT, rid="twice", sampling_params=LONG))
    wait_for(lambda: num_requests(server) == 1)
    response = server.http.post("/generate", json={"text": "a", "rid": "twice"})
    assert response.status_code == 400 and "twice" in response.json()["error"]["message"]
    assert thread.is_alive()
    server.http.post("/abort_request", json={"rid": "twice"})
    thread.join(20)


def test_bad_buckets_change_nothing(server: ServerProcess, folder: Path, reference, tmp_path: Path) -> None:
    """Broadcasts with an unknown name, wrong shape, wrong dtype or too few bytes are refused and end their session."""
    tensors = {name: tensor * 2 for name, tensor in logical_tensors(folder).items()}
    trainer = TrainerProcess(tensors, tmp_path)
    try:
        joined = server.http.post("/init_weights_update_group", json=trainer.join_fields())
        assert joined.status_code == 200, joined.text
        name = "model.norm.weight"
        changes: list[tuple[dict[str, Any], int, str]] = [
            ({"names": ["model.norm.wait"]}, 0, "model.norm.wait"),
            ({"shapes": [[24, 2]]}, 0, name),
            ({"dtypes": ["bfloat16"], "shapes": [[96]]}, 0, name),
            ({"dtypes": ["int32"]}, 0, "int32"),
            ({}, 8, "shorter than"),
        ]
        for change, cut, reason in changes:
            assert server.http.post("/begin_weight_update", json={}).status_code == 200
            second = server.http.post("/begin_weight_update", json={})
            assert second.status_code == 409, "a second begin"
            refused = server.http.post(
                "/update_weights_from_distributed", json=trainer.send([name], cut_bytes=cut) | change
            )
            assert refused.status_code == 400 and reason in refused.json()["message"], refused.text
            assert server.http.post("/end_weight_update", json={}).status_code == 409
            assert fingerprints(server) == reference[0]
        lost = server.http.post("/update_weights_from_distributed", json=trainer.send([name]))
        assert lost.status_code == 409, "it may be of the update that was refused"
        assert server.http.post("/abort_weight_update", json={}).status_code == 409, "a new start"
        ok = server.http.post("/update_weights_from_distributed", json=trainer.send([name]))
        assert ok.status_code == 200, "after all that a good bucket is taken"
        assert fingerprints(server) != reference[0]
        version = server.http.get("/weight_version").json()
        assert "default+1" in str(version)
        # and back, so that the other tests see the old weights
        undo = TrainerProcess(logical_tensors(folder), tmp_path)
        try:
            assert server.http.post("/init_weights_update_group", json=undo.join_fields()).status_code == 200
            assert server.http.post("/update_weights_from_distributed", json=undo.send([name])).status_code == 200
        finally:
            undo.close()
    finally:
        trainer.close()


def test_nothing_was_changed_by_any_of_it(server: ServerProcess, reference) -> None:
    assert fingerprints(server) == reference[0]
    same(generate(server, text=TEXT), reference[1])
    assert num_requests(server) == 0
    load = server.http.get("/server_info").json()["internal_states"][0]
    assert load.get("paused") in (False, None)
    assert server.http.post("/flush_cache").status_code == 200
