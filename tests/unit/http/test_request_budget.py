"""The most that a request may come to hold: counted before it begins, with a 413 that names limit, value and flag."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from capture.codec import encode_dict
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import TooLarge
from rollout.core.messages.io_struct import SchedulerReady, TokenizedGenerateReqInput
from rollout.families.registry import load_model_config
from rollout.http.native.generate import GenerateRequest
from rollout.http.openai.protocol import CompletionRequest
from rollout.server.engine import Engine
from rollout.tokenizer_manager import budget as budgets
from rollout.tokenizer_manager import replay
from rollout.tokenizer_manager.budget import AnswerForm, BudgetLimits
from rollout.tokenizer_manager.request import GenerateReqInput, expand
from rollout.tokenizer_manager.validation import ServingLimits, check_messages
from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness
from tests.unit.capture.test_replay_forms import routes

VOCAB = 8192
CONTEXT = 16_384
FEW_S = 5.0
MASKS = {
    "input_ids": [1, 2, 3],
    "return_sampling_mask": True,
    "sampling_params": {"n": 16, "max_new_tokens": 128, "top_k": 4096, "temperature": 1.5, "ignore_eos": True},
}
"""The body of bug C3, of 162 bytes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    return tiny_checkpoint(path, "moe_dense_first", seed=1, vocab_size=VOCAB, context_length=CONTEXT)


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_server(folder, engine=EngineThread, with_tokenizer=False, max_total_tokens=4096) as server:
        yield server
        assert server.scheduler.error is None


@pytest.fixture(scope="module")
def limits(folder: Path) -> ServingLimits:
    args = ServerArgs(model_path=str(folder), enable_return_routed_experts=True)
    ready = SchedulerReady(
        max_total_num_tokens=10**6, max_running_requests=1, context_length=CONTEXT, capture_routed_experts=True,
        num_threads=1, num_parameters=1,
 model_bytes=0, weight_version="",
    )  # fmt: skip
    return ServingLimits.of(args, load_model_config(folder), ready, None)


def check(limits: ServingLimits, body: dict[str, Any], model: Any = GenerateRequest) -> list[TokenizedGenerateReqInput]:
    """Return the messages of a body within the limits, and raise `TooLarge` for any other."""
    request = model.model_validate(body).to_request({})
    expanded = expand(request)
    check_messages(expanded, limits, AnswerForm.of(request))
    return expanded.messages


def with_budget(limits: ServingLimits, **fields: Any) -> ServingLimits:
    return replace(limits, budget=replace(limits.budget, **fields))


def sampling(**params: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 100} | params}


# --- masks -------------------------------------------------------------------------------------------------------


def test_masks_over_the_limit_are_413_before_a_token_is_computed_c3(live: Live) -> None:
    """C3: a body of 162 bytes made an answer of 39 MiB, and held 466 MiB."""
    started = time.monotonic()
    status, message = live.refused(**MASKS)
    assert status == 413 and time.monotonic() - started < FEW_S
    assert "8388608 ids of sampling masks" in message and "4194304" in message and "--max-logprob-entries" in message
    assert not live.scheduler.scheduler.queues.all()
    columns = MASKS | {
        "sampling_mask_format": "csr",
        "sampling_params": MASKS["sampling_params"] | {"max_new_tokens": 2},
    }
    assert len(live.generate(**columns)) == 16, "columns cost less than lists"


@pytest.mark.parametrize(
    ("fields", "params", "most"),
    [
        ({}, {"top_k": 100}, 1000 // 100),
        ({}, {"top_k": 100, "top_p": 0.5}, 1000 // 100),
        ({}, {"top_k": 7000}, 0),
        ({"sampling_mask_format": "csr"}, {"top_k": 100}, 16_000 // 100),
        ({"sampling_logprobs_mode": "support"}, {"top_k": 100}, 2000 // 300),
        ({}, {"top_k": 100, "temperature": 0.0}, 1000),
        ({}, {"top_k": 1}, 1000),
        ({"return_logprob": True, "top_logprobs_num": 100}, {"top_k": 100}, 1000 // 200),
    ],
)
def test_masks_are_counted_in_the_budget_of_alternatives_c3(
    limits: ServingLimits, fields: dict[str, Any], params: dict[str, Any], most: int
) -> None:
    few = with_budget(limits, max_logprob_entries=1000)
    body = {"input_ids": [1], "return_sampling_mask": True} | fields
    for n in (1, 2):
        for tokens, is_taken in ((most // n, True), (most // n + 1, False)):
            asked = body | {"sampling_params": params | {"n": n, "max_new_tokens": tokens}}
            if is_taken:
                check(few, asked)
            else:
                with pytest.raises(TooLarge, match="--max-logprob-entries"):
                    check(few, asked)


def test_masks_of_top_p_alone_get_a_share_of_what_is_left_c3(limits: ServingLimits) -> None:
    """Their size is unknown until the end: counting the maximum would refuse requests that turn out small."""
    few = with_budget(limits, max_logprob_entries=1000)
    body = {"input_ids": [1], "return_sampling_mask": True}
    (message,) = check(few, body | {"sampling_params": {"top_p": 0.9, "max_new_tokens": 10, "n": 4}})
    assert message.max_mask_ids == 250
    (message,) = check(limits, body | {"sampling_params": {"top_p": 0.9, "max_new_tokens": 10, "n": 4}})
    assert message.max_mask_ids is None, "all that they could hold fits"
    with pytest.raises(TooLarge, match="1001 ids of sampling masks"):
        check(few, body | {"sampling_params": {"top_p": 0.9, "max_new_tokens": 1001}})


@pytest.mark.parametrize("stream", [False, True])
def test_a_sample_whose_masks_come_over_its_share_ends_with_413_c3(folder: Path, stream: bool) -> None:
    harness = Harness(folder, sampling_mask_max_tokens=VOCAB)
    params = {"temperature": 1.5, "top_p": 0.5, "max_new_tokens": 20, "sampling_seed": 3}
    rid = harness.submit([1, 2, 3], params=params, return_sampling_mask=True, stream=stream)
    harness.run()
    counts = harness.results[rid].mask.counts
    most = sum(counts[:5])
    for share, kept, status in ((most, 5, 413), (sum(counts), 20, None)):
        rid = harness.submit([1, 2, 3], params=params, return_sampling_mask=True, max_mask_ids=share, stream=stream)
        harness.run()
        result = harness.results[rid]
        assert len(result.token_ids) == kept and sum(result.mask.counts) <= share
        assert result.finished.reason.status_code == status
        assert status is None or "--max-logprob-entries" in result.finished.reason.message
    harness.check_idle()


# --- bytes -------------------------------------------------------------------------------------------------------

BIAS = {str(token_id): 1.0 for token_id in range(4096)}
SCORED = {"return_logprob": True, "logprob_start_len": 0}
LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "samples": ({"input_ids": [[1]] * 100, "sampling_params": {"max_new_tokens": 0, "n": 20}}, "samples"),
    "tokens": (sampling(n=500, max_new_tokens=600), "tokens"),
    "prompts": ({"input_ids": [[5] * 1000] * 100, "sampling_params": {"max_new_tokens": 0}}, "prompt tokens"),
    "log-probabilities": (sampling(n=100, max_new_tokens=500) | {"return_logprob": True}, "log-probabilities"),
    "compact ones": (
        sampling(n=200, max_new_tokens=500) | {"return_logprob": True, "logprobs_format": "compact"},
        "log-probabilities",
    ),
    "scored prompts": (
        {"input_ids": [[1] * 500] * 100, "sampling_params": {"max_new_tokens": 0}} | SCORED, "log-probabilities"
    ),
    "alternatives": (sampling() | {"return_logprob": True, "top_logprobs_num": 500}, "log-probabilities"),
    "chosen ids": (sampling() | {"return_logprob": True, "token_ids_logprob": [7] * 500}, "log-probabilities"),
    "masks": (sampling(top_k=2000) | {"return_sampling_mask": True}, "ids of sampling masks"),
    "routes": (sampling(n=100, max_new_tokens=1000) | {"return_routed_experts": True}, "routes"),
    "prompts in answers": (
        {"input_ids": [5] * 1000, "sampling_params": {"n": 500, "max_new_tokens": 0}, "return_prompt_token_ids": True},
        "prompt tokens in the answer",
    ),
    "penalties": (
        {"input_ids": [5] * 1000, "sampling_params": {"n": 500, "max_new_tokens": 1, "repetition_penalty": 1.1}},
        "penalty",
    ),
    "bias": (
        {"input_ids": [[1]] * 100, "sampling_params": {"max_new_tokens": 1, "logit_bias": BIAS}},
        "logit_bias",
    ),
    "stop strings": (
        {"input_ids": [[1]] * 100, "sampling_params": {"max_new_tokens": 1, "stop": ["x" * 1000] * 32}}, "stop strings"
    ),
    "stop ids": (
        {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "n": 512, "stop_token_ids": [1] * 1000}},
        "stop_token_ids",
    ),
    "chosen ids of prompts": (
        {"input_ids": [[1]] * 100, "token_ids_logprob": [1] * 4000, "sampling_params": {"max_new_tokens": 0}},
        "token_ids_logprob",
    ),
    "streams": (sampling(n=10) | {"stream": True, "return_logprob": True, "top_logprobs_num": 50}, "log-probabilities"),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_whatever_a_client_can_multiply_is_413_over_a_limit_in_bytes_c3(limits: ServingLimits, name: str) -> None:
    body, what = LARGE[name]
    limits = replace(limits, has_tokenizer=True)
    with pytest.raises(TooLarge, match=f"{what}.*--max-request-mb") as caught:
        check(with_budget(limits, max_request_bytes=4 << 20), body)
    assert "is 4 MB" in str(caught.value)
    check(with_budget(limits, max_request_bytes=400 << 20), body)


def test_another_dialects_answer_costs_more(limits: ServingLimits) -> None:
    body = {"prompt": [1], "max_tokens": 100, "logprobs": 1000}
    with pytest.raises(TooLarge, match="--max-request-mb"):
        check(with_budget(limits, max_request_bytes=64 << 20), body, CompletionRequest)
    native = sampling() | {"return_logprob": True, "top_logprobs_num": 1000}
    check(with_budget(limits, max_request_bytes=64 << 20), native)


def test_the_largest_requests_of_the_default_are_those_that_are_usual(limits: ServingLimits) -> None:
    """16 samples of 16k tokens with all that a trainer asks for, and scoring by the hundred."""
    rl = {"return_logprob": True, "return_routed_experts": True, "return_sampling_mask": True}
    check(limits, sampling(n=16, max_new_tokens=16_000, top_p=0.95) | rl)
    check(limits, {"input_ids": [[1] * 16_000] * 256, "sampling_params": {"max_new_tokens": 0}} | SCORED)
    check(limits, {"input_ids": [[1] * 500] * 512, "sampling_params": {"max_new_tokens": 2000, "n": 8}})


def test_no_alternatives_at_all_still_leave_requests(limits: ServingLimits) -> None:
    none = with_budget(limits, max_logprob_entries=0)
    check(none, sampling(n=16) | {"return_logprob": True})
    with pytest.raises(TooLarge, match="limit of 0"):
        check(none, sampling() | {"return_logprob": True, "top_logprobs_num": 1})


# --- what several prompts share ----------------------------------------------------------------------------------


def test_lists_that_4096_prompts_share_are_checked_once(limits: ServingLimits) -> None:
    """A check of each would take a minute of the event loop; a copy for each, gigabytes."""
    body = {
        "input_ids": [[1]] * 4096,
        "token_ids_logprob": [1] * 4096,
        "sampling_params": {"max_new_tokens": 1, "logit_bias": BIAS, "stop_token_ids": [1] * 1024},
    }
    started = time.process_time()
    with pytest.raises(TooLarge, match="logit_bias"):
        check(limits, body)
    assert time.process_time() - started < FEW_S
    messages = check(with_budget(limits, max_request_bytes=1 << 40), body)
    assert len({id(message.sampling_params) for message in messages}) == 1


def test_routes_that_prompts_share_are_read_once(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = replay.read_replay
    monkeypatch.setattr(replay, "read_replay", lambda *args: reads.append(1) or read(*args))
    body = {"input_ids": [[1, 2, 3, 4, 5]] * 50, "sampling_params": {"max_new_tokens": 1}}
    answers = live.generate(**body, replay_routed_experts=encode_dict(routes()))
    assert len(answers) == 50 and len(reads) == 1


def test_an_abort_that_repeats_a_name_costs_as_much_as_the_name(live: Live) -> None:
    """400,000 times a group of 512 samples were 200 million names."""
    handle: list[Any] = []

    def submit() -> None:
        params = {"n": 512, "max_new_tokens": 4000}
        request = GenerateReqInput(input_ids=[1], rid="g", sampling_params=params, return_logprob=False)
        task = asyncio.ensure_future(live.manager.submit(request))
        task.add_done_callback(lambda done: handle.append(done.result()))

    live.call_in_loop(submit)
    live.wait_until(lambda: bool(handle))
    started = time.process_time()
    reply = live.client.post("/abort_request", json={"rid": ["g", "g_1", "other"] * 130_000})
    assert reply.status_code == 200 and time.process_time() - started < FEW_S
    live.wait_until(lambda: live.manager.num_in_flight == 0)


# --- wrong variants ----------------------------------------------------------------------------------------------


@pytest.mark.mutant
@pytest.mark.parametrize("name", ["samples", "prompts", "built"])
def test_a_budget_that_forgets_something_is_noticed(
    limits: ServingLimits, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "built":
        kinds = {key: kind._replace(built=0.0) for key, kind in budgets.KINDS.items()}
        monkeypatch.setattr(budgets, "KINDS", kinds)
    else:
        add = budgets.RequestBudget.add

        def forgetful(self: Any, source: TokenizedGenerateReqInput) -> None:
            if name == "samples" or not self._total:
                params = msgspec.structs.replace(source.sampling_params, n=1)
                add(self, msgspec.structs.replace(source, sampling_params=params) if name == "samples" else source)

        monkeypatch.setattr(budgets.RequestBudget, "add", forgetful)
    taken = 0
    for body, _ in LARGE.values():
        try:
            check(with_budget(replace(limits, has_tokenizer=True), max_request_bytes=4 << 20), body)
            taken += 1
        except TooLarge:
            pass
    assert taken, "what is forgotten lets a request in"


def test_the_defaults_are_those_of_the_flags() -> None:
    args = ServerArgs(model_path="m")
    assert BudgetLimits() == BudgetLimits(
        args.max_request_mb << 20, args.max_logprob_entries, args.sampling_mask_max_tokens
    )


def test_the_table_of_bytes_in_the_docs_is_the_budget() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/http/request_limits.md").read_text()
    table = page.split("| what | held |")[1].split("\n\n")[0].splitlines()[2:]
    found = [tuple(cell.strip() for cell in line.split("|")[2:6]) for line in table]
    entries = {0: "", 1: "1/16", 2: "1/8", 8: "1/2", 16: "1"}
    assert found == [
        (f"{kind.held:g}", f"{kind.built:g}", f"{kind.scheduler:g}", entries[kind.units])
        for kind in budgets.KINDS.values()
    ]


PROMPT = [5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(model_path=str(folder), dtype="float32", max_total_tokens=4096, random_seed=1)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs_num": 300, "sampling_params": {"n": 64, "max_new_tokens": 400}},
        {"token_ids_logprob": [7] * 4000, "sampling_params": {"n": 16, "max_new_tokens": 100}},
        {"top_logprobs_num": 300, "input_ids": [PROMPT * 40] * 100, "logprob_start_len": 0},
    ],
)
def test_engine_22_more_log_probabilities_than_memory_is_for_are_refused(engine: Engine, fields: dict) -> None:
    body = {"input_ids": PROMPT, "return_logprob": True} | fields
    with pytest.raises(TooLarge, match="log-probabilities"):
        engine.generate(**body)
    few = body | {"input_ids": PROMPT, "sampling_params": {"n": 2, "max_new_tokens": 2, "temperature": 0.0}}
    assert len(engine.generate(**few)) == 2
