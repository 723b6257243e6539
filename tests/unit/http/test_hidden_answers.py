"""Hidden states over HTTP, in front of a real engine: their forms, their rows, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from capture.hidden_states import HiddenStates
from rollout.client import RolloutClient
from rollout.client.binary import MEDIA_TYPE
from rollout.client.errors import ResponseFormatError
from rollout.client.generation import generate_body, parse_answer
from rollout.client.types import GenerationOutput
from rollout.server.engine import Engine
from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint
from tests.streams import events, resumed
from tests.troubleshooting import require_entry

PROMPT = [5, 9, 2, 6, 30, 31]
SIZE, LAST = 48, 3
PARAMS = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
BODY = {"input_ids": PROMPT, "sampling_params": PARAMS, "return_hidden_states": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5, dtype="bfloat16")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_server(folder, engine=EngineThread, with_tokenizer=False, max_total_tokens=4096) as server:
        yield server
        assert server.scheduler.error is None


def compact(live: Live, layers: list[int], **fields: Any) -> np.ndarray:
    """Return the numbers [T, L, D] in the compact form."""
    meta = live.generate(**BODY | fields, hidden_state_layers=layers, hidden_states_format="compact")["meta_info"]
    return read(meta).values


def read(meta: dict[str, Any]) -> HiddenStates:
    content = meta["hidden_states"]
    spans = [(span["version"], span["start"], span["end"]) for span in meta["hidden_states_weight_versions"]]
    start = meta["hidden_states_start_len"]
    return HiddenStates.of_text(
        content["data"], content["dtype"], content["shape"], meta["hidden_state_layers"], start, spans
    )


def test_sglangs_form_has_the_prompts_rows_in_a_list_of_their_own(live: Live) -> None:
    meta = live.generate(**BODY)["meta_info"]
    of_prompt, *of_output = meta["hidden_states"]
    assert len(of_prompt) == 6 and len(of_output) == 3, "the last token is no input"
    assert meta["hidden_state_layers"] == [LAST] and meta["hidden_states_start_len"] == 0
    want = compact(live, [-1])
    assert want.shape == (9, 1, SIZE)
    assert np.array_equal(np.array([*of_prompt, *of_output], dtype=np.float32), want[:, 0])


def test_named_layers_are_lists_in_a_row(live: Live) -> None:
    of_prompt, *of_output = live.generate(**BODY, hidden_state_layers=[0, -1])["meta_info"]["hidden_states"]
    want = compact(live, [0, LAST])
    assert np.array_equal(np.array([*of_prompt, *of_output], dtype=np.float32), want)
    assert not np.array_equal(want[:, 0], want[:, 1])


def test_the_compact_form_has_the_models_own_bits(live: Live) -> None:
    meta = live.generate(**BODY, hidden_state_layers=[1, -2], hidden_states_format="compact")["meta_info"]
    assert meta["hidden_states"]["dtype"] == "bfloat16" and meta["hidden_states"]["shape"] == [9, 2, SIZE]
    assert len(base64.b64decode(meta["hidden_states"]["data"])) == 9 * 2 * SIZE * 2
    assert meta["hidden_state_layers"] == [1, 2]
    assert meta["hidden_states_weight_versions"] == [{"version": "default", "start": 0, "end": 9, "weight_epoch": 0}]
    states = read(meta)
    assert states.weight_versions == (("default", 0, 9),)
    assert np.array_equal(states.values[:, 0], compact(live, [1])[:, 0])


def test_msgpack_has_the_bytes(live: Live) -> None:
    text = live.generate(**BODY, hidden_states_format="compact")["meta_info"]["hidden_states"]["data"]
    for form in ("nested", "compact"):
        reply = live.client.post(
            "/generate", json=BODY | {"hidden_states_format": form}, headers={"accept": MEDIA_TYPE}
        )
        found = msgspec.msgpack.decode(reply.content)["meta_info"]["hidden_states"]
        assert found == {"dtype": "bfloat16", "shape": [9, 1, SIZE], "data": base64.b64decode(text)}


def test_the_client_reads_them(live: Live) -> None:
    want = compact(live, [2, LAST])
    options: Any = {
        "input_ids": PROMPT, "sampling_params": PARAMS, "return_hidden_states": True, "hidden_state_layers": (2, -1),
    }  # fmt: skip
    with RolloutClient(live.url) as client:
        output = client.generate(None, **options)
        *parts, last = client.stream(None, **options)
        part = client.generate(None, **options, hidden_states_start_len=4)
    assert isinstance(output, GenerationOutput) and isinstance(part, GenerationOutput)
    for each in (output, last):
        assert each.hidden_states is not None and each.hidden_states.layers == (2, LAST)
        assert np.array_equal(each.hidden_states.values, want)
    assert all(each.hidden_states is None for each in parts), "they come with the end"
    assert part.hidden_states is not None and part.hidden_states.start == 4
    assert np.array_equal(part.hidden_states.values, want[4:])


@pytest.mark.parametrize("form", ["nested", "compact"])
def test_a_stream_of_new_tokens_has_all_rows_in_its_last_event(live: Live, form: str) -> None:
    whole = live.generate(**BODY, hidden_states_format=form)["meta_info"]["hidden_states"]
    sent = BODY | {"hidden_states_format": form, "stream_format": "incremental", "resumable": True}
    *parts, last = events(live, **sent, stream=True, rid=form)
    assert len(parts) > 1 and not any("hidden_states" in part["meta_info"] for part in parts)
    assert last["meta_info"]["hidden_states"] == whole
    for count in range(5):
        assert resumed(live, form, count)[-1]["meta_info"]["hidden_states"] == whole


def test_a_batch_says_which_prompts_want_them(live: Live) -> None:
    body = {"input_ids": [PROMPT, PROMPT[:2]], "sampling_params": PARAMS | {"n": 2}}
    answers = live.generate(**body, return_hidden_states=[False, True])
    assert ["hidden_states" in answer["meta_info"] for answer in answers] == [False, False, True, True]
    assert [len(answer["meta_info"]["hidden_states"][0]) for answer in answers[2:]] == [2, 2]


def test_scored_prompts_and_late_starts(live: Live) -> None:
    want = compact(live, [LAST])
    scored = live.generate(**BODY | {"sampling_params": {"max_new_tokens": 0}})["meta_info"]["hidden_states"]
    assert np.array_equal(np.array(scored[0], dtype=np.float32), want[:6, 0]) and len(scored) == 1
    late = live.generate(**BODY, hidden_states_start_len=6)["meta_info"]["hidden_states"]
    assert late[0] == [] and np.array_equal(np.array(late[1:], dtype=np.float32), want[6:, 0])
    one = BODY | {"sampling_params": PARAMS | {"max_new_tokens": 1}, "hidden_states_start_len": 6}
    assert live.generate(**one)["meta_info"]["hidden_states"] == [[]]
    assert live.generate(**one, hidden_states_format="compact")["meta_info"]["hidden_states"] is None


def test_the_engine_in_a_process_returns_them(live: Live, folder: Path) -> None:
    engine = Engine(model_path=str(folder), max_total_tokens=512, skip_tokenizer_init=True)
    answer = engine.generate(
        input_ids=PROMPT, sampling_params=PARAMS, return_hidden_states=True, hidden_states_format="compact"
    )
    engine.close()
    assert isinstance(answer, dict)
    assert np.array_equal(read(json.loads(json.dumps(answer["meta_info"]))).values, compact(live, [LAST]))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a layer too many": ({"hidden_state_layers": [4]}, "hidden_state_layers must be in 0..3"),
    "before the embedding": ({"hidden_state_layers": [-5]}, "hidden_state_layers must be in 0..3"),
    "a layer twice": ({"hidden_state_layers": [1, -3]}, "names a layer twice"),
    "no layer": ({"hidden_state_layers": []}, "hidden_state_layers is empty"),
    "too many names": ({"hidden_state_layers": [0] * 2000}, "names a layer twice"),
    "a start after the prompt": ({"hidden_states_start_len": 7}, "hidden_states_start_len must be in 0..6"),
    "a start before it": ({"hidden_states_start_len": -1}, "hidden_states_start_len must be in 0..6"),
    "another form": ({"hidden_states_format": "npy"}, "hidden_states_format"),
    "layers of nothing": (
        {"hidden_state_layers": [1], "return_hidden_states": False},
        "hidden_state_layers needs return_hidden_states",
    ),
    "a list for one prompt": ({"return_hidden_states": [True]}, "return_hidden_states is a list"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_fields_are_refused(live: Live, case: str) -> None:
    fields, reason = BAD[case]
    status, message = live.refused(**BODY | fields)
    assert status == 400 and reason in message
    assert not live.scheduler.scheduler.queues.all()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_other_doors_refuse_them(live: Live, path: str) -> None:
    body = {"prompt": PROMPT, "messages": [], "input_ids": PROMPT, "token_ids": PROMPT, "return_hidden_states": True}
    wanted = {"/v1/completions": ("prompt",), "/v1/chat/completions": ("messages", "input_ids")}.get(
        path, ("token_ids",)
    )
    status, message = live.refused(path, **{name: body[name] for name in (*wanted, "return_hidden_states")})
    assert status == 400 and "return_hidden_states" in message


@pytest.mark.parametrize(("form", "most"), [("nested", 300), ("compact", 1500)])
def test_a_reply_over_the_limit_is_refused_before_it_begins(folder: Path, form: str, most: int) -> None:
    """The bound counts samples, tokens, layers and the size of a number."""
    body = {"return_hidden_states": True, "hidden_states_format": form, "hidden_state_layers": [0, 1, 2, 3]}
    with live_server(
        folder, engine=EngineThread, with_tokenizer=False, max_total_tokens=4096, max_request_mb=4
    ) as server:
        small = {"input_ids": [[3] * 8], "sampling_params": {"max_new_tokens": 0}}
        assert len(server.generate(**small, **body)) == 1
        params = {"max_new_tokens": 1, "n": most // 50}
        status, message = server.refused(**body, input_ids=[[3] * 400], sampling_params=params)
        assert status == 413 and "hidden states" in message and "--max-request-mb" in message
        require_entry(message)
        assert not server.scheduler.scheduler.queues.all()


Change = Any
CHANGES: dict[str, Change] = {
    "a byte less": lambda states: states.update(data=states["data"][:-4]),
    "another shape": lambda states: states.update(shape=[8, 1, SIZE]),
    "an unknown dtype": lambda states: states.update(dtype="int4"),
    "no base64": lambda states: states.update(data="%" + states["data"][1:]),
    "a row less": lambda states: states.update(
        shape=[8, 1, SIZE], data=base64.b64encode(base64.b64decode(states["data"])[: -2 * SIZE]).decode()
    ),
    "no dtype": lambda states: states.pop("dtype"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_an_answer_that_contradicts_itself_is_an_error(live: Live, change: Change) -> None:
    body = generate_body(None, {"input_ids": PROMPT, "sampling_params": PARAMS, "return_hidden_states": True})
    content = live.generate(**body)
    assert isinstance(parse_answer(content, body, None), GenerationOutput)
    change(content["meta_info"]["hidden_states"])
    with pytest.raises(ResponseFormatError):
        parse_answer(content, body, None)
