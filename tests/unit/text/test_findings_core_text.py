"""Regression tests of end tokens, stop strings and the text of broken characters: each fails before its fix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.core.errors import TooLarge
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.policy import RequestQueues
from rollout.scheduler.req import Req
from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.stop import StopChecker
from rollout.server.engine import Engine
from rollout.text.tokenizer import Tokenizer
from rollout.text.tokenizer_files import read_tokenizer
from rollout.tokenizer_manager.handle import SampleText
from rollout.tokenizer_manager.sample import SampleRecord
from tests.model_zoo import tiny_checkpoint
from tests.tiny_tokenizer import write_tiny_tokenizer

IM_END = 2  # in the checkpoints that `make_checkpoint` writes
PROMPT = [5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer ends turns with `<|im_end|>`, which its configurations do not name."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "dense", seed=1)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text()) | {"eos_token_id": 0}
        (folder / name).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(model_path=str(folder), dtype="float32", max_total_tokens=4096, random_seed=1)
    yield engine
    engine.close()


def generate(engine: Engine, bias: dict[int, float], **params: Any) -> dict[str, Any]:
    """A sample of what `bias` makes certain."""
    params = {"temperature": 0.0, "max_new_tokens": 6, "logit_bias": {str(k): v for k, v in bias.items()}} | params
    return engine.generate(input_ids=PROMPT, sampling_params=params)


# --- 16 ----------------------------------------------------------------------------------------------------------


def test_engine_16_the_end_token_of_the_tokenizer_ends_a_sample(engine: Engine) -> None:
    answer = generate(engine, {IM_END: 1000})
    assert answer["output_ids"] == [IM_END] and answer["text"] == ""
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": IM_END}
    assert len(generate(engine, {IM_END: 1000}, ignore_eos=True)["output_ids"]) == 6
    late = generate(engine, {IM_END: 1000}, min_new_tokens=3)
    assert len(late["output_ids"]) == 4 and late["output_ids"].index(IM_END) == 3
    assert generate(engine, {0: 1000})["output_ids"] == [0], "that of the configuration still does"


def test_engine_16_without_tokenizer_the_configuration_alone_counts(folder: Path) -> None:
    engine = Engine(model_path=str(folder), max_total_tokens=256, skip_tokenizer_init=True)
    assert generate(engine, {IM_END: 1000})["output_ids"] == [IM_END] * 6
    engine.close()


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("trim", [True, False])
def test_engine_16_stop_strings_see_special_tokens(engine: Engine, skip: bool, trim: bool) -> None:
    answer = generate(
        engine, {IM_END: 1000}, ignore_eos=True, stop=["<|im_end|>"], skip_special_tokens=skip, no_stop_trim=not trim
    )
    assert answer["output_ids"] == [IM_END]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "<|im_end|>"}
    assert answer["text"] == ("" if skip or trim else "<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def accepted(checker: StopChecker, **params: Any) -> Req:
    """A request as the scheduler makes it, with nothing of a scheduler but `checker`."""
    source = TokenizedGenerateReqInput(
        rid="r", input_ids=[0], sampling_params=SamplingParams(max_new_tokens=100_000, ignore_eos=True, **params)
    )
    queues = RequestQueues(DecodeBatch())
    scheduler = SimpleNamespace(
        _check=lambda source: None,
        _seeds=SimpleNamespace(seed_for=lambda source: 0),
        _stop=checker,
        _arrivals=0,
        _by_rid={},
        queues=queues,
    )
    Scheduler._accept(scheduler, source)  # type: ignore[arg-type]
    return queues.waiting[0]


def answers(checker: StopChecker, token_ids: list[int], **params: Any) -> list[Any]:
    req = accepted(checker, **params)
    found = []
    for token_id in token_ids:
        req.output_ids.append(token_id)
        reason = checker.check(req)
        found.append(reason.matched if reason else None)
    return found


@pytest.mark.parametrize("skip", [True, False])
def test_engine_16_a_special_token_is_text_between_the_others(tokenizer_folder: Path, skip: bool) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    checker = StopChecker((), read_tokenizer(tokenizer_folder).backend)
    (a, special, b) = tokenizer._encode(["a<|im_end|>b"], False)[0]
    ids = [a, special, b]
    assert answers(checker, ids, stop=["ab"], skip_special_tokens=skip) == [None, None, None]
    assert answers(checker, ids, stop=["a<|im_end|>b"], skip_special_tokens=skip)[-1] == "a<|im_end|>b"
    assert answers(checker, ids, stop=["nd|>"], skip_special_tokens=skip) == [None, "nd|>", None]


# --- 21 ----------------------------------------------------------------------------------------------------------


class CountingTokenizer:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_tokens = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_tokens += len(ids)
        return self._tokenizer.decode(ids, **options)


@pytest.mark.parametrize("text", [b"\x80", b"\xf0\x90\x80", b"\xe4\xb8\xad\xff", "\ufffd".encode()])
def test_engine_21_a_stream_of_broken_characters_decodes_each_token_a_few_times(
    tokenizer_folder: Path, text: bytes
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    ids = ([byte_tokens(tokenizer_folder)[value] for value in text] * 4000)[:4000]
    counting = CountingTokenizer(tokenizer)
    record = SampleRecord(TokenizedGenerateReqInput(rid="r", input_ids=[0], sampling_params=SamplingParams()), 0.0, "v")
    shown = SampleText(record, counting)  # type: ignore[arg-type]
    before = ""
    for token_id in ids:
        record.output_ids.append(token_id)
        now = shown.update()
        assert now.startswith(before)
        before = now
    assert counting.num_tokens < 100 * len(ids)
    assert tokenizer.decode(ids).startswith(before) and len(before) >= len(tokenizer.decode(ids)) - 24


def byte_tokens(folder: Path) -> list[int]:
    """Token ids by byte, of a byte-level vocabulary: printable bytes stand for themselves, the others follow."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    others = iter(range(256, 512))
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [vocabulary[chr(byte if byte in printable else next(others))] for byte in range(256)]


def test_engine_21_a_long_stop_string_costs_a_token_no_more_than_a_short_one(tokenizer_folder: Path) -> None:
    checker = StopChecker((), read_tokenizer(tokenizer_folder).backend)
    counting = CountingTokenizer(checker._tokenizer)
    checker._tokenizer, checker._adds_bytes = counting, False  # type: ignore[assignment]  # every token is looked at
    tokenizer = Tokenizer.load(tokenizer_folder)
    stop = "a" + "\U0001f600" * 1023
    (a,), ids = tokenizer._encode(["a", stop], False)
    assert answers(checker, [a] * 3000, stop=[stop]) == [None] * 3000
    assert counting.num_tokens < 20 * 3000
    assert answers(checker, ids, stop=[stop]) == [None] * (len(ids) - 1) + [stop]


# --- 22: a cap ---------------------------------------------------------------------------------------------------


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
