"""Typos are not silent: an unknown field is named in the answer, and refused by strict servers and clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.client import RolloutClient
from rollout.client.generation import generate_body
from rollout.client.wire import verb_call
from rollout.core.errors import BadRequest
from rollout.core.known_fields import HARMLESS_FIELDS, HARMLESS_OPENAI_FIELDS, MAX_IGNORED, nearest
from rollout.core.messages.io_struct import VERBS
from rollout.core.messages.weights import BeginWeightUpdateReqInput
from rollout.http.control.body import body_of
from rollout.http.native.generate import GenerateRequest
from rollout.http.protocol import unknown_fields
from rollout.server.engine import Engine
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint
from tests.tiny_tokenizer import write_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_server(folder) as server:
        yield server


@pytest.fixture(scope="module")
def strict(folder: Path) -> Iterator[Live]:
    with live_server(folder, strict_requests=True) as server:
        yield server


@pytest.fixture(autouse=True)
def _goes_on(live: Live, strict: Live) -> Iterator[None]:
    yield
    for server in (live, strict):
        server.client.post("/continue_generation")


PROMPT = [5, 6, 7]
FEW = {"max_new_tokens": 2}
TYPOS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "generate": ("/generate", {"input_ids": PROMPT, "sampling_params": FEW}, "retrun_logprob", "return_logprob"),
    "completions": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, "max_token", "max_tokens"),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "top_logprob", "top_logprobs",
    ),
    "tokens": (
        "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}, "steam", "stream"
    ),
    "skyrl": ("/skyrl/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}, "steam", "stream"),
    "tokenize": ("/tokenize", {"prompt": "a"}, "add_special_token", "add_special_tokens"),
    "v1 tokenize": ("/v1/tokenize", {"prompt": "a"}, "promt", "prompt"),
    "detokenize": ("/detokenize", {"tokens": PROMPT}, "skip_special_token", "skip_special_tokens"),
    "pause": ("/pause_generation", {}, "mod", "mode"),
    "resume": ("/resume_memory_occupation", {}, "tag", "tags"),
    "begin": ("/begin_weight_update", {}, "converage", "coverage"),
    "from tensor": (
        "/update_weights_from_tensor",
        {"format": "safetensors", "serialized_named_tensors": ["AAAA"]},
        "wieght_version", "weight_version",
    ),
    "bucket": (
        "/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, "gruop_name", "group_name"
    ),
    "prefix cache": ("/reset_prefix_cache", {}, "reset_running_request", "reset_running_requests"),
    "sleepers": ("/abort_requests", {"request_ids": ["a"]}, "request_id", "request_ids"),
}  # fmt: skip


def ignored(answer: Any) -> Any:
    """Return the fields that an answer lists as ignored, wherever the list is."""
    if "meta_info" in answer:
        return answer["meta_info"].get("ignored_fields")
    return answer.get("ignored_fields")


@pytest.mark.parametrize("name", TYPOS)
def test_a_typo_is_named_in_the_answer_n20(live: Live, name: str) -> None:
    """N20: `retrun_logprob` was a 200 without log-probabilities."""
    path, body, typo, _ = TYPOS[name]
    plain = live.client.post(path, json=body)
    assert plain.status_code == 200 and ignored(plain.json()) is None
    reply = live.client.post(path, json=body | {typo: True})
    assert reply.status_code == 200 and ignored(reply.json()) == [typo]


@pytest.mark.parametrize("name", TYPOS)
def test_a_strict_server_refuses_it_and_says_what_was_meant_n20(strict: Live, name: str) -> None:
    path, body, typo, meant = TYPOS[name]
    assert strict.client.post(path, json=body).status_code == 200
    reply = strict.client.post(path, json=body | {typo: True})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == f"{typo} is not a known field; did you mean {meant}?"


ENTRY = {"name": "a", "dtype": "b", "shape": []}
INSIDE: dict[str, tuple[str, dict[str, Any], str]] = {
    "sampling_params.max_new_token": (
        "/generate", {"input_ids": PROMPT, "sampling_params": FEW | {"max_new_token": 2}}, "max_new_tokens"
    ),
    "sampling_params.temprature": (
        "/generate",
        {"input_ids": [PROMPT] * 2, "sampling_params": [FEW, FEW | {"temprature": 2}]},
        "temperature",
    ),
    "sampling_params.sede": (
        "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "sede": 2}}, "seed"
    ),
    "stream_options.include_usages": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 2, "stream_options": {"include_usages": True}},
        "include_usage",
    ),
    "manifest[1].fingerprnt": (
        "/begin_weight_update", {"manifest": [ENTRY, ENTRY | {"fingerprnt": "0"}]}, "fingerprint"
    ),
    "update_info.pakced": (
        "/update_weights",
        {"update_info": {"names": [], "dtype_names": [], "shapes": [], "pakced": True}},
        "packed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("named", INSIDE)
def test_so_is_one_inside_of_a_field_n20(live: Live, strict: Live, named: str) -> None:
    path, body, meant = INSIDE[named]
    answer = live.client.post(path, json=body).json()
    first = answer[0] if isinstance(answer, list) else answer
    assert ignored(first) == [named] or not answer.get("success", True)
    reply = strict.client.post(path, json=body)
    assert reply.status_code == 400 and f"{named} is not a known field; did you mean {meant}?" in reply.text


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_a_stream_names_it_too_n20(live: Live, path: str) -> None:
    body = {
        "/generate": {"input_ids": PROMPT, "sampling_params": FEW},
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
        "/v1/chat/completions": {"input_ids": PROMPT, "messages": [], "max_tokens": 2},
        "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
    }[path]
    reply = live.client.post(path, json=body | {"stream": True, "nonsense": 1})
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert ["nonsense"] in [ignored(event) for event in events]


def test_a_name_in_the_url_of_a_verb_is_one_too_n20(live: Live, strict: Live) -> None:
    assert live.client.post("/pause?mod=keep").json()["ignored_fields"] == ["?mod"]
    live.client.post("/resume")
    reply = strict.client.post("/pause?mod=keep")
    assert reply.status_code == 400 and "?mod is not a known field; did you mean mode?" in reply.text
    assert strict.client.post("/pause?mode=keep&clear_cache=false").status_code == 200
    strict.client.post("/resume")
    assert strict.client.get("/weight_update?update_id=x").status_code in (200, 404)
    assert strict.client.get("/weight_update?update_di=x").status_code == 400


def test_an_answer_without_an_object_names_it_in_a_header_n20(live: Live) -> None:
    reply = live.client.post("/abort_request", json={"rid": "a", "abort_al": True})
    assert reply.status_code == 200 and reply.headers["x-ignored-fields"] == '["abort_al"]'
    reply = live.client.post("/flush_cache?timout=1")
    assert reply.headers["x-ignored-fields"] == '["?timout"]'


@pytest.mark.parametrize("name", ["a\r\nset-cookie: x", "ä" * 5000, "\U0001f600", "", " ", "\x00"])
def test_a_name_of_any_characters_does_no_harm_n20(live: Live, name: str) -> None:
    reply = live.client.post("/abort_request", json={"rid": "a", name: 1})
    assert reply.status_code == 200 and "set-cookie" not in reply.headers
    assert len(reply.headers["x-ignored-fields"]) < 1000
    (named,) = live.generate(input_ids=PROMPT, sampling_params=FEW, **{name: 1})["meta_info"]["ignored_fields"]
    assert named.isascii() and len(named) < 1000


def test_many_names_are_named_in_part_n20(live: Live, strict: Live) -> None:
    body = {"input_ids": PROMPT, "sampling_params": FEW, **{f"field_{i}" * 20: 1 for i in range(20_000)}}
    assert len(live.generate(**body)["meta_info"]["ignored_fields"]) == MAX_IGNORED
    assert strict.refused(**body)[0] == 400


# --- not a typo --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, True])
def test_what_other_servers_know_and_what_is_null_asks_for_nothing_n20(strict: Live, value: Any) -> None:
    harmless = dict.fromkeys(HARMLESS_FIELDS - {"session_id"}, value)
    answer = strict.generate(input_ids=PROMPT, sampling_params=FEW | {"stream_interval": 1}, **harmless)
    assert "ignored_fields" not in answer["meta_info"]
    books = dict.fromkeys(HARMLESS_OPENAI_FIELDS - {"session_id", "model", "user"}, value)
    reply = strict.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2} | books)
    assert reply.status_code == 200 and "ignored_fields" not in reply.json()


def test_null_under_any_name_asks_for_nothing_n20(strict: Live) -> None:
    answer = strict.generate(input_ids=PROMPT, nonsense=None, sampling_params=FEW | {"nonsense": None, "regex": ""})
    assert "ignored_fields" not in answer["meta_info"]


def test_what_the_frameworks_clients_were_recorded_to_send_is_known_n20() -> None:
    bodies = {"/generate": GenerateRequest}
    bodies |= {verb.endpoint.path: body_of(verb) for verb in VERBS if verb.endpoint.path is not None}
    seen = 0
    for file in (Path(__file__).parents[2] / "recorded").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            call = json.loads(line)
            path, body = call.get("call", " ").split()[-1:] or [""], call.get("body")
            model = bodies.get(path[0].split("?")[0]) if path else None
            if model is not None and isinstance(body, dict):
                seen += 1
                assert not unknown_fields(model, body), line[:200]
    assert seen > 10


# --- the clients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retrun_logprob": True}, "retrun_logprob is not a known field; did you mean return_logprob?"),
        ({"sampling_params": {"max_new_token": 2}}, "max_new_token is not a known field; did you mean max_new_tokens?"),
        ({"sampling_params": [{}, {"tempreature": 2}]}, "did you mean temperature?"),
        ({"sampling_params": {"zzz": 1}}, "sampling_params.zzz is not a known field"),
    ],
)  # fmt: skip
def test_the_client_refuses_a_typo_before_it_sends_anything_n20(options: dict[str, Any], message: str) -> None:
    def never(request: httpx.Request) -> httpx.Response:
        raise AssertionError("sent")

    with RolloutClient(transport=httpx.MockTransport(never)) as client:
        for call in (client.generate, client.stream):
            with pytest.raises(BadRequest) as caught:
                call("a", **options)
            assert message in str(caught.value)


def test_the_client_passes_on_what_a_server_may_know_n20() -> None:
    params = {"max_tokens": 2, "seed": 1, "regex": "a", "stream_interval": 2, "custom_params": {"a": 1}}
    assert generate_body("a", {"sampling_params": params})["sampling_params"] == params
    assert generate_body("a", {"extra_body": {"of_another_server": 1}})["of_another_server"] == 1


def test_the_client_refuses_a_typo_in_a_verb_n20() -> None:
    with pytest.raises(BadRequest, match="converage is not a known field; did you mean coverage"):
        verb_call(BeginWeightUpdateReqInput, lambda reply: reply, converage="full")


def test_the_engine_in_one_process_names_it_too_n20(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "dense", seed=1)
    settings: dict[str, Any] = {"model_path": str(folder), "max_total_tokens": 256, "skip_tokenizer_init": True}
    engine = Engine(**settings)
    answer = engine.generate(input_ids=PROMPT, sampling_params=FEW | {"max_new_token": 9, "regexp": "a"})
    assert isinstance(answer, dict)
    assert answer["meta_info"]["ignored_fields"] == ["sampling_params.max_new_token", "sampling_params.regexp"]
    engine.close()
    engine = Engine(**settings, strict_requests=True)
    with pytest.raises(BadRequest, match="did you mean max_new_tokens"):
        engine.generate(input_ids=PROMPT, sampling_params=FEW | {"max_new_token": 9})
    engine.close()


def test_the_nearest_name_of_a_long_one_is_found_quickly() -> None:
    assert nearest("x" * 10**7, GenerateRequest.model_fields) is None
    assert nearest("retrun_logprob" + "b" * 10**7, GenerateRequest.model_fields) is None
