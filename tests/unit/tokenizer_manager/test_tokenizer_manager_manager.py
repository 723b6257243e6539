"""`TokenizerManager` against a link that only records: phases, races, deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import BadRequest, StartupError, Unavailable
from rollout.core.messages.io_struct import (
    AbortReqInput,
    BatchTokenOutput,
    ContinueGenerationReqInput,
    ControlReqOutput,
    FlushCacheReqInput,
    GetStateReqInput,
    PauseGenerationReqInput,
    SchedulerFailed,
    SchedulerReady,
    TokenizedGenerateReqInput,
)
from rollout.core.messages.req_output import FinishedRecord, FinishReason, ReqOutput, VersionSpan
from rollout.families.registry import load_model_config
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager.channel import SchedulerChannel
from rollout.tokenizer_manager.communicator import Communicator, SchedulerTimeout
from rollout.tokenizer_manager.manager import Phase, TokenizerManager
from rollout.tokenizer_manager.request import GenerateReqInput
from tests.tiny_tokenizer import write_model_folder

READY = SchedulerReady(
    max_total_num_tokens=200, max_running_requests=8, context_length=160, capture_routed_experts=True, num_threads=1,
    num_parameters=1,
    model_bytes=1, weight_version="v0",
)  # fmt: skip


class RecordingLink:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.sent += messages

    async def receive(self) -> Any:
        await asyncio.Event().wait()


class SlowTokenizer(Tokenizer):
    """A real tokenizer that takes a while."""

    async def encode(self, texts: Any, *, add_special_tokens: bool = True) -> list[list[int]]:
        await asyncio.sleep(0.05)
        return await super().encode(texts, add_special_tokens=add_special_tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(Path(tmp_path_factory.mktemp("model")))


def make_manager(folder: Path) -> tuple[TokenizerManager, RecordingLink]:
    link = RecordingLink()
    return TokenizerManager(ServerArgs(model_path=str(folder)), load_model_config(folder), link), link


def serving(folder: Path) -> tuple[TokenizerManager, RecordingLink]:
    manager, link = make_manager(folder)
    manager.serve(READY, SlowTokenizer.load(folder))
    return manager, link


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10.0))


def output(rid: str, ids: list[int], total: int, reason: FinishReason | None = None, **record: Any) -> BatchTokenOutput:
    finished = None if reason is None else FinishedRecord(reason=reason, **record)
    one = ReqOutput(rid=rid, token_ids=ids, num_output_tokens=total, weight_version="v1", finished=finished)
    return BatchTokenOutput(outputs=[one])


def test_nothing_is_admitted_before_and_after_serving(folder: Path) -> None:
    async def scenario() -> None:
        manager, link = make_manager(folder)
        request = GenerateReqInput(input_ids=[1])
        for phase in ("starting", "stopping"):
            with pytest.raises(Unavailable, match=phase):
                await manager.submit(request)
            with pytest.raises(Unavailable, match=phase):
                await manager.control(PauseGenerationReqInput, timeout_s=1.0)
            manager.serve(READY, None)
            manager.stop_admitting()
        assert link.sent == []

    run(scenario())


def test_what_is_in_flight_finishes_while_stopping(folder: Path) -> None:
    async def scenario() -> None:
        manager, _ = serving(folder)
        handle = await manager.submit(GenerateReqInput(input_ids=[1], rid="r"))
        manager.stop_admitting()
        manager.handle_message(output("r", [65], 1, FinishReason(type="length", length=1)))
        assert (await handle.results())[0]["output_ids"] == [65]

    run(scenario())


def test_an_abort_during_tokenisation_is_not_lost(folder: Path) -> None:
    async def scenario(abort: Any) -> None:
        manager, link = serving(folder)
        submitting = asyncio.create_task(
            manager.submit(GenerateReqInput(text="hello", rid="r", return_routed_experts=True))
        )
        await asyncio.sleep(0.01)
        abort(manager)
        [response] = await (await submitting).results()
        meta = response["meta_info"]
        assert meta["finish_reason"]["message"] == "Abort before prefill"
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (1, 0, 0)
        assert meta["routed_experts"] == "" and meta["routed_experts_start_len"] == 0
        assert not [m for m in link.sent if isinstance(m, TokenizedGenerateReqInput)]
        assert manager.num_in_flight == 0

    run(scenario(lambda manager: manager.abort(["r"])))
    run(scenario(lambda manager: manager.abort_all()))


def test_a_cancelled_submit_frees_its_name(folder: Path) -> None:
    async def scenario() -> None:
        manager, link = serving(folder)
        submitting = asyncio.create_task(manager.submit(GenerateReqInput(text="hello", rid="r")))
        await asyncio.sleep(0.01)
        with pytest.raises(BadRequest, match="in flight"):
            await manager.submit(GenerateReqInput(input_ids=[1], rid="r"))
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
        await manager.submit(GenerateReqInput(input_ids=[1], rid="r"))
        assert len(link.sent) == 1

    run(scenario())


def test_a_server_that_stops_while_a_prompt_is_tokenised_does_not_send_it(folder: Path) -> None:
    async def scenario() -> None:
        manager, link = serving(folder)
        submitting = asyncio.create_task(manager.submit(GenerateReqInput(text="hello")))
        await asyncio.sleep(0.01)
        manager.stop_admitting()
        with pytest.raises(Unavailable):
            await submitting
        assert link.sent == []

    run(scenario())


def test_cancelling_who_waits_aborts(folder: Path) -> None:
    async def scenario() -> None:
        manager, link = serving(folder)
        handle = await manager.submit(GenerateReqInput(input_ids=[[1], [2]], rid=["a", "b"]))
        waiting = asyncio.create_task(handle.results())
        await asyncio.sleep(0.01)
        manager.handle_message(output("a", [65], 1, FinishReason(type="length", length=1)))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert [m.rids for m in link.sent if isinstance(m, AbortReqInput)] == [["b"]]

    run(scenario())


def test_samples_that_end_while_another_is_sent_are_shown_once(folder: Path) -> None:
    async def scenario() -> None:
        manager, _ = serving(folder)
        handle = await manager.submit(GenerateReqInput(input_ids=[[1], [2]], rid=["a", "b"], stream=True))
        end = FinishReason(type="length", length=1)
        seen = []
        manager.handle_message(output("a", [65], 1))
        manager.handle_message(output("b", [66], 1))
        async for index, response in handle.stream():
            seen.append((index, response["meta_info"]["finish_reason"] is not None))
            if len(seen) == 1:
                manager.handle_message(output("b", [], 1, end))
            if len(seen) == 2:
                manager.handle_message(output("a", [], 1, end))
        assert seen == [(0, False), (1, True), (0, True)]

    run(scenario())


def test_version_spans_and_the_version_of_the_last_token(folder: Path) -> None:
    async def scenario() -> None:
        manager, _ = serving(folder)
        handle = await manager.submit(GenerateReqInput(input_ids=[1], rid="r"))
        spans = [VersionSpan("v0", 0, 1, 3), VersionSpan("v1", 1, 2, 4)]
        reason = FinishReason(type="stop", matched=264)
        manager.handle_message(
            output("r", [65, 264], 2, reason, weight_versions=spans, kv_weight_version_oldest="v0", num_retractions=3)
        )
        [response] = await handle.results()
        meta = response["meta_info"]
        assert meta["weight_versions"] == [
            {"version": "v0", "start": 0, "end": 1, "weight_epoch": 3},
            {"version": "v1", "start": 1, "end": 2, "weight_epoch": 4},
        ]
        assert (meta["weight_version_start"], meta["weight_version_end"], meta["weight_version"]) == ("v0", "v1", "v1")
        assert (meta["kv_weight_version_oldest"], meta["num_retractions"]) == ("v0", 3)

    run(scenario())


def test_routes_that_did_not_arrive_are_an_error(folder: Path) -> None:
    async def scenario() -> None:
        manager, _ = serving(folder)
        handle = await manager.submit(GenerateReqInput(input_ids=[1], rid="r", return_routed_experts=True))
        manager.handle_message(output("r", [65], 1, FinishReason(type="length", length=1)))
        with pytest.raises(Exception, match="routed experts did not arrive"):
            await handle.results()

    run(scenario())


def test_log_probabilities_that_do_not_match_the_tokens_are_an_error(folder: Path) -> None:
    async def scenario() -> None:
        manager, _ = serving(folder)
        handle = await manager.submit(GenerateReqInput(input_ids=[1], rid="r", return_logprob=True))
        manager.handle_message(output("r", [65], 1, FinishReason(type="length", length=1)))
        with pytest.raises(Exception, match="1 tokens with 0 log-probabilities"):
            await handle.results()

    run(scenario())


def test_a_failure_at_startup_has_the_schedulers_words(folder: Path) -> None:
    async def scenario() -> None:
        manager, _ = make_manager(folder)
        waiting = asyncio.create_task(manager.scheduler_ready())
        await asyncio.sleep(0)
        manager.handle_message(SchedulerFailed(message="model.safetensors is truncated"))
        with pytest.raises(StartupError, match="truncated"):
            await waiting
        assert manager.phase is Phase.FAILED

    run(scenario())


def test_the_version_follows_the_answers(folder: Path) -> None:
    async def scenario() -> None:
        manager, link = serving(folder)

        async def call(**answer: Any) -> None:
            calling = asyncio.create_task(manager.control(ContinueGenerationReqInput, timeout_s=5.0))
            await asyncio.sleep(0)
            manager.handle_message(ControlReqOutput(request_id=link.sent[-1].request_id, **answer))
            await calling

        before, reply = manager.weight_version, {"paused": False, "num_aborted": 0}
        await call(success=False, data=reply | {"weight_version": "v8"})
        assert manager.weight_version == before
        await call(success=True, data=reply | {"weight_version": "v9"})
        assert manager.weight_version == "v9"

    run(scenario())


def test_verbs_have_deadlines_and_fail_together() -> None:
    async def scenario() -> None:
        sent: list[Any] = []
        communicator = Communicator(sent.append)
        started = time.monotonic()
        with pytest.raises(SchedulerTimeout, match="did not answer GetState"):
            await communicator.call(GetStateReqInput, 0.05)
        assert time.monotonic() - started < 2.0
        calls = [asyncio.create_task(communicator.call(FlushCacheReqInput, 5.0)) for _ in range(3)]
        await asyncio.sleep(0)
        communicator.resolve(ControlReqOutput(request_id=sent[2].request_id, success=True, message="second", data={}))
        communicator.fail_all(Unavailable("gone"))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[1], ControlReqOutput) and results[1].message == "second"
        assert isinstance(results[0], Unavailable) and isinstance(results[2], Unavailable)
        assert communicator.num_waiting == 0

    run(scenario())


def test_sending_without_a_scheduler_fails_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        channel = SchedulerChannel(tmp_path)
        with pytest.raises(Unavailable, match="not connected"):
            channel.send(AbortReqInput(abort_all=True))
        channel.close()

    run(scenario())


def test_a_folder_too_deep_for_a_socket_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="too long"):
        SchedulerChannel(tmp_path / ("x" * 200))


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_folder_without_a_usable_tokenizer_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(StartupError) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value) and "--skip-tokenizer-init" in str(caught.value)


def test_engine_13_a_prompt_is_sent_once_whatever_n_is(folder: Path) -> None:
    async def scenario() -> None:
        manager, link = serving(folder)
        ids = [[1] * 50, [2] * 50]
        params = {"max_new_tokens": 2, "n": 64, "sampling_seed": 5}
        handle = await manager.submit(GenerateReqInput(input_ids=ids, sampling_params=params, rid="g"))
        assert [message.input_ids for message in link.sent] == ids
        samples = [sample for message in link.sent for sample in message.samples()]
        assert [sample.rid for sample in samples] == [record.rid for record in handle.records]
        assert [sample.sampling_params for sample in samples] == [
            record.source.sampling_params for record in handle.records
        ]

    run(scenario())
