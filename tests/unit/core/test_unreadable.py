"""A message that does not decode, in either direction: requests that it names get an error, and both loops go on."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import BadRequest
from rollout.core.messages import unreadable
from rollout.core.messages.io_struct import (
    BatchTokenOutput,
    ControlReqOutput,
    FlushCacheReqInput,
    GetStateReqInput,
    ReplayedRoutes,
    SchedulerReady,
    TokenizedGenerateReqInput,
    decode_input,
    decode_output,
    encode,
)
from rollout.core.messages.req_output import FinishedRecord, FinishReason, ReqOutput
from rollout.core.messages.unreadable import Unreadable, encode_output, packed, read_input, read_output
from rollout.core.sampling_params import SamplingParams
from rollout.families.registry import load_model_config
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import GenerateReqInput
from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness
from tests.tiers import examples

ROUTES = {"dtype": "uint8", "shape": [1, 3, 3], "data": base64.b64encode(bytes([0, 0, 0, 0, 1, 2, 0, 1, 2])).decode()}
PROMPT = [5, 6, 7, 8]
FEW = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=1)


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_server(folder, engine=EngineThread, max_total_tokens=2048, dtype="float32") as server:
        yield server
        assert server.scheduler.error is None


def request(rid: str, **fields: Any) -> TokenizedGenerateReqInput:
    params = SamplingParams(**FEW)
    return TokenizedGenerateReqInput(rid=rid, input_ids=list(PROMPT), sampling_params=params, **fields)


def changed(message: Any, **fields: Any) -> bytes:
    """Encode the message with these fields replaced by values of any type."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(message)) | fields)


def finished(rid: str, tokens: list[int]) -> ReqOutput:
    record = FinishedRecord(reason=FinishReason(type="length", length=len(tokens)))
    return ReqOutput(rid=rid, token_ids=tokens, num_output_tokens=len(tokens), weight_version="v", finished=record)


# --- over HTTP ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [True, False, 1.0, "1", -1, 2**40, 10**30, [0], {}])
def test_a_start_of_routes_that_is_no_position_is_400_and_the_server_lives_c2(live: Live, start: Any) -> None:
    """C2: a request with `"start": true` ended the scheduler."""
    body = {"input_ids": PROMPT, "sampling_params": FEW, "replay_routed_experts": ROUTES | {"start": start}}
    status, message = live.refused(**body)
    assert status == 400 and "replay_routed_experts" in message
    assert live.scheduler.error is None
    assert len(live.generate(input_ids=PROMPT, sampling_params=FEW)["output_ids"]) == 4


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"shape": [True, 3, 3]}, "shape"),
        ({"shape": [1, 3, 3.0]}, "shape"),
        ({"shape": {"0": 1}}, "shape"),
        ({"shape": [1, 3]}, "shape"),
        ({"shape": [10**30, 3, 3]}, "shape"),
        ({"dtype": ["uint8"]}, "dtype"),
        ({"data": [1]}, "data"),
        ({"data": None}, "data"),
    ],
)
def test_an_envelope_of_routes_has_a_schema_c2(live: Live, fields: dict[str, Any], name: str) -> None:
    status, message = live.refused(input_ids=PROMPT, sampling_params=FEW, replay_routed_experts=ROUTES | fields)
    assert status == 400 and name in message


LONG = int("9" * 4300)  # longer ones are no JSON


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {"1": 10**400}},
        {"logit_bias": {"1" * 4000: 1}},
        {"logit_bias": {"1": 1, "01": 2}},
        {"max_new_tokens": LONG},
        {"min_new_tokens": LONG, "max_new_tokens": LONG},
        {"top_k": LONG},
        {"n": LONG},
        {"sampling_seed": LONG},
        {"stop_token_ids": [LONG]},
        {"temperature": 10**400},
    ],
)
def test_a_number_of_any_length_is_a_bad_request_c2(live: Live, params: dict[str, Any]) -> None:
    """Sums of such numbers do not fit into a message."""
    status, message = live.refused(input_ids=PROMPT, sampling_params=FEW | params)
    assert status == 400 and "sampling_params" in message and len(message) < 5000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": PROMPT, "max_kv_version_lag": LONG}),
        ("/generate", {"input_ids": PROMPT, "routed_dp_rank": LONG}),
        ("/generate", {"input_ids": PROMPT, "routed_experts_start_len": LONG}),
        ("/generate", {"input_ids": PROMPT, "logprob_start_len": LONG, "return_logprob": True}),
        ("/generate", {"input_ids": PROMPT, "token_ids_logprob": [LONG], "return_logprob": True}),
        ("/generate", {"input_ids": [LONG]}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": LONG}),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": LONG}),
        ("/v1/completions", {"prompt": PROMPT, "logit_bias": {"1": "1e999"}}),
        ("/v1/completions", {"prompt": PROMPT, "temperature": "nan"}),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": LONG}}),
        ("/detokenize", {"tokens": [LONG]}),
    ],
)
def test_so_it_is_in_every_field_c2(live: Live, path: str, body: dict[str, Any]) -> None:
    status, message = live.refused(path, **body)
    assert status == 400 and message


# --- at the scheduler --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"replay": {"data": b"", "shape": [0, 2, 3], "start": True}},
        {"sampling_params": {"max_new_tokens": "4"}},
        {"input_ids": [5, True]},
        {"siblings": [["a_1", None], ["a_2", "x"]]},
        {"priority": 1.5},
        {"session_id": 7},
    ],
)
def test_a_request_that_does_not_decode_is_refused_by_its_rid_c2(folder: Path, fields: dict[str, Any]) -> None:
    harness = Harness(folder)
    harness.submit(PROMPT, rid="good", params=FEW)
    harness.channel.inbox.append(changed(request("a", siblings=[("a_1", None), ("a_2", None)]), **fields))
    harness.scheduler.tick(0)
    outputs = [output for message in harness.channel.outbox for output in message.outputs if output.rid != "good"]
    harness.channel.outbox.clear()
    assert outputs[0].rid == "a"
    for output in outputs:
        reason = output.finished.reason
        assert (reason.type, reason.status_code) == ("abort", 400) and "cannot read" in reason.message
    harness.run()
    assert len(harness.results["good"].token_ids) == 4


def test_every_sample_of_a_message_is_refused_c2(folder: Path) -> None:
    harness = Harness(folder)
    harness.channel.inbox.append(changed(request("a", siblings=[("a_1", None), ("a_2", 5)]), stream=3))
    harness.scheduler.tick(0)
    rids = [output.rid for message in harness.channel.outbox for output in message.outputs]
    assert rids == ["a", "a_1", "a_2"]


def test_a_verb_that_does_not_decode_is_answered_c2(folder: Path) -> None:
    harness = Harness(folder)
    harness.channel.inbox.append(changed(FlushCacheReqInput(request_id="f"), retract=[1]))
    answer = harness.wait("f")
    assert (answer.success, answer.status_code) == (False, 400) and "cannot read" in answer.message
    assert harness.control(GetStateReqInput).success


@pytest.mark.parametrize(
    "data", [b"", b"?", b"\xc1", encode(request("x"))[:-3], encode([1]), encode({"rid": "x"}), b"\x91" * 3000]
)
def test_bytes_that_are_no_message_do_not_end_the_scheduler_c2(folder: Path, data: bytes) -> None:
    harness = Harness(folder)
    harness.channel.inbox.append(data)
    harness.scheduler.tick(0)
    harness.channel.outbox.clear()
    (result,) = harness.generate([PROMPT], params=FEW)
    assert len(result.token_ids) == 4


# --- in the main process -----------------------------------------------------------------------------------------


class Link:
    """A link to a scheduler whose answers the test puts into `manager`; `sent` collects the messages to it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.sent += [decode_input(packed(message)) for message in messages]

    async def receive(self) -> Any:
        await asyncio.Event().wait()


@pytest.fixture
def manager(folder: Path) -> TokenizerManager:
    args = ServerArgs(model_path=str(folder), skip_tokenizer_init=True)
    made = TokenizerManager(args, load_model_config(folder), Link())
    ready = SchedulerReady(
        max_total_num_tokens=1000, max_running_requests=8, context_length=100, capture_routed_experts=True,
        num_threads=1, num_parameters=1, model_bytes=1, weight_version="v",
    )  # fmt: skip
    made.serve(ready, None)
    return made


STATE_ID = "state_id________________________"  # as long as a verb's


def outcome(result: Any) -> Any:
    if isinstance(result, ControlReqOutput):
        return "done" if result.success else f"refused: {result.message}"
    return str(result) if isinstance(result, Exception) else result["output_ids"]


async def play(manager: TokenizerManager, rids: list[str], messages: list[bytes]) -> list[Any]:
    """Return how the requests, and a verb "state", end when these messages come."""
    handles = [await manager.submit(GenerateReqInput(input_ids=PROMPT, rid=rid, sampling_params=FEW)) for rid in rids]
    verb = asyncio.ensure_future(manager.control(GetStateReqInput, timeout_s=5))
    await asyncio.sleep(0)
    request_id = manager._link.sent[-1].request_id  # type: ignore[attr-defined]
    for data in messages:
        manager.handle_message(read_output(data.replace(STATE_ID.encode(), request_id.encode())))
    results = await asyncio.wait_for(
        asyncio.gather(*(handle.result() for handle in handles), verb, return_exceptions=True), 5
    )
    return [outcome(each) for each in results]


def test_an_output_that_does_not_decode_fails_its_request_alone_c2(manager: TokenizerManager) -> None:
    broken = msgspec.msgpack.decode(encode(BatchTokenOutput(outputs=[finished("a", [1]), finished("b", [2])])))
    broken["outputs"][0]["token_ids"] = ["x"]
    answer = encode(ControlReqOutput(request_id=STATE_ID, success=False, message="no"))
    a, b, verb = asyncio.run(play(manager, ["a", "b"], [msgspec.msgpack.encode(broken), answer]))
    assert "cannot be read" in a and b == [2] and verb == "refused: no"
    assert manager.num_in_flight == 0


def test_an_answer_that_does_not_decode_fails_its_verb_alone_c2(manager: TokenizerManager) -> None:
    answer = changed(ControlReqOutput(request_id=STATE_ID, success=True), success="yes")
    a, verb = asyncio.run(play(manager, ["a"], [answer, encode(BatchTokenOutput(outputs=[finished("a", [1])]))]))
    assert a == [1] and "cannot be read" in verb


@pytest.mark.parametrize("data", [b"?", b"", b"\xc1", encode([1, 2]), encode({"type": "BatchTokenOutput"})])
def test_bytes_that_name_nobody_fail_all_and_the_next_request_is_served_c2(
    manager: TokenizerManager, data: bytes
) -> None:
    a, verb = asyncio.run(play(manager, ["a"], [data]))
    assert "cannot be read" in a and "cannot be read" in verb
    answers = [BatchTokenOutput(outputs=[finished("b", [3])]), ControlReqOutput(request_id=STATE_ID, success=False)]
    b, _ = asyncio.run(play(manager, ["b"], [encode(answer) for answer in answers]))
    assert b == [3]


def test_an_output_that_cannot_be_sent_fails_its_request_alone_c2() -> None:
    broken = finished("a", [1])
    broken.token_ids = [2**70]
    message = read_output(encode_output(BatchTokenOutput(outputs=[broken, finished("b", [2])])))
    assert isinstance(message, BatchTokenOutput)
    a, b = message.outputs
    assert a.rid == "a" and a.finished.reason.status_code == 500 and b == finished("b", [2])


def test_an_answer_that_cannot_be_sent_is_a_failed_verb() -> None:
    answer: ControlReqOutput[Any] = ControlReqOutput(request_id="v", success=True, data=object(), dp_rank=1)  # type: ignore[arg-type]
    message = read_output(encode_output(answer))
    assert isinstance(message, ControlReqOutput)
    assert (message.request_id, message.success, message.status_code, message.dp_rank) == ("v", False, 500, 1)


# --- any message -------------------------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**66), 2**66)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(set(TokenizedGenerateReqInput.__struct_fields__) - {"input_ids"})


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(FIELDS), PLAIN)
def test_what_is_packed_can_be_decoded(name: str, value: Any) -> None:
    """The sender refuses a value of any field, or the receiver reads it."""
    message = request("r", replay=ReplayedRoutes(data=b"", shape=(0, 2, 3)))
    setattr(message, name, value)
    try:
        data = packed(message)
    except BadRequest:
        return
    assert not isinstance(read_input(data), Unreadable)


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400), st.booleans())
def test_any_bytes_are_read_or_unreadable(noise: bytes, at: int, as_input: bool) -> None:
    data = (
        encode(request("r", siblings=[("s", 1)]))
        if as_input
        else encode(BatchTokenOutput(outputs=[finished("r", [1])]))
    )
    mutated = data[:at] + noise + data[at + len(noise) :]
    for read in (read_input, read_output):
        found = read(mutated)
        assert isinstance(found, Unreadable) or msgspec.structs.asdict(found) is not None


@pytest.mark.mutant
def test_a_main_process_that_does_not_decode_what_it_sends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreadable, "decode_input", lambda data: None)
    data = packed(request("r", replay=ReplayedRoutes(data=b"", shape=(0, 2, 3), start=True)))
    monkeypatch.undo()
    assert isinstance(read_input(data), Unreadable)


def test_engine_01_an_answer_that_cannot_be_encoded_is_a_failed_answer(folder: Path) -> None:
    harness = Harness(folder)
    sent = harness.channel.send
    harness.channel.send = lambda message: sent(_through_msgpack(message))  # as over a socket
    harness.scheduler._verbs.update(
        {FlushCacheReqInput: lambda verb: ControlReqOutput(request_id=verb.request_id, success=True, data={"n": 2**70})}
    )
    answer = harness.control(FlushCacheReqInput)
    assert not answer.success and answer.status_code == 500


def _through_msgpack(message):
    return decode_output(encode_output(message))
