"""Stop strings over tokens that are parts of characters: the quick check of a token never hides a match."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.scheduler import stop
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.policy import RequestQueues
from rollout.scheduler.req import Req
from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.stop import StopChecker
from rollout.server.engine import Engine
from rollout.text.tokenizer import Tokenizer as TextTokenizer
from rollout.text.tokenizer_files import read_tokenizer
from tests.model_zoo import tiny_checkpoint
from tests.tiers import examples
from tests.tiny_tokenizer import write_tiny_tokenizer

TEXTS = st.text("abEND\n é😀", min_size=1, max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))).backend


class LooksAtEveryToken(StopChecker):
    """A checker by the definition: it searches after every token."""

    def _may_end_stop(self, token_id: int, params: SamplingParams) -> bool:
        return True


class ForgetsHalfCharacters(StopChecker):
    """Looks for the last character of a stop string in tokens that hold a part of it only."""

    def _may_end_stop(self, token_id: int, params: SamplingParams) -> bool:
        text = self._token_text(token_id)
        return any(stop[-1] in text for stop in params.stop)


def matches(checker: StopChecker, token_ids: list[int], **params: object) -> list[object]:
    """Return the match that `checker` reports after each of the tokens, or None."""
    source = TokenizedGenerateReqInput(
        rid="r", input_ids=[0], sampling_params=SamplingParams(max_new_tokens=10_000, ignore_eos=True, **params)
    )  # fmt: skip
    req = Req(source, arrival=0, seed=0, end_ids=checker.end_ids(source), stop_text=checker.text_for(source))
    answers: list[object] = []
    for token_id in token_ids:
        req.output_ids.append(token_id)
        reason = checker.check(req)
        answers.append(reason.matched if reason else None)
    return answers


@settings(max_examples=examples(300), deadline=None)
@given(text=TEXTS, noise=st.lists(st.integers(0, 265), max_size=6), stop=st.lists(TEXTS, min_size=1, max_size=2))
@example(text="aé", noise=[], stop=["é"])
@example(text="a", noise=[], stop=["\ufffd"])
def test_the_quick_look_changes_no_answer(tokenizer: Tokenizer, text: str, noise: list[int], stop: list[str]) -> None:
    token_ids = tokenizer.encode(text).ids
    for skip in (True, False):
        for ids in (token_ids, noise + token_ids, token_ids + noise):
            quick = matches(StopChecker((), tokenizer), ids, stop=stop, skip_special_tokens=skip)
            assert quick == matches(LooksAtEveryToken((), tokenizer), ids, stop=stop, skip_special_tokens=skip)


@pytest.mark.mutant
def test_a_quick_look_that_forgets_half_characters_is_noticed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé").ids
    assert len(ids) == 3, "é takes two tokens"
    assert matches(StopChecker((), tokenizer), ids, stop=["é"]) == [None, None, "é"]
    assert matches(ForgetsHalfCharacters((), tokenizer), ids, stop=["é"]) == [None, None, None]


def test_most_tokens_are_not_searched(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = StopChecker((), tokenizer)
    searches = []
    search = stop._matched_string
    monkeypatch.setattr(stop, "_matched_string", lambda *args: searches.append(args) or search(*args))
    ids = tokenizer.encode("hello hello a END").ids
    assert matches(checker, ids, stop=["a END"])[-1] == "a END"
    assert len(searches) == 1


def test_an_end_token_wins_over_a_stop_string_and_that_over_the_length(tokenizer: Tokenizer) -> None:
    checker = StopChecker((), tokenizer)
    (a,) = tokenizer.encode("a").ids
    for params, answer in (
        ({"stop": ["a"], "stop_token_ids": [a]}, ("stop", a)),
        ({"stop": ["a"]}, ("stop", "a")),
        ({"stop": ["a"], "min_new_tokens": 1}, ("stop", "a")),
        ({}, ("length", None)),
    ):
        source = TokenizedGenerateReqInput(
            rid="r", input_ids=[0], sampling_params=SamplingParams(max_new_tokens=1, **params)
        )
        req = Req(source, arrival=0, seed=0, end_ids=checker.end_ids(source), stop_text=checker.text_for(source))
        req.output_ids.append(a)
        reason = checker.check(req)
        assert (reason.type, reason.matched) == answer


# --- end tokens and stop strings of special tokens, in an engine ------------------------------------------------------


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
    """Generate a sample of the tokens that `bias` makes certain."""
    params = {"temperature": 0.0, "max_new_tokens": 6, "logit_bias": {str(k): v for k, v in bias.items()}} | params
    return engine.generate(input_ids=PROMPT, sampling_params=params)


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
    """Let a scheduler accept a request, with stand-ins for all its parts but `checker`; return the request."""
    source = TokenizedGenerateReqInput(
        rid="r", input_ids=[0], sampling_params=SamplingParams(max_new_tokens=100_000, ignore_eos=True, **params)
    )
    queues = RequestQueues(DecodeBatch())
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=300))
    scheduler = SimpleNamespace(
        runner=SimpleNamespace(state=SimpleNamespace(model=model)),
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
    tokenizer = TextTokenizer.load(tokenizer_folder)
    checker = StopChecker((), read_tokenizer(tokenizer_folder).backend)
    (a, special, b) = tokenizer._encode(["a<|im_end|>b"], False)[0]
    ids = [a, special, b]
    assert answers(checker, ids, stop=["ab"], skip_special_tokens=skip) == [None, None, None]
    assert answers(checker, ids, stop=["a<|im_end|>b"], skip_special_tokens=skip)[-1] == "a<|im_end|>b"
    assert answers(checker, ids, stop=["nd|>"], skip_special_tokens=skip) == [None, "nd|>", None]


class CountingTokenizer:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_tokens = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_tokens += len(ids)
        return self._tokenizer.decode(ids, **options)


def test_engine_21_a_long_stop_string_costs_a_token_no_more_than_a_short_one(tokenizer_folder: Path) -> None:
    checker = StopChecker((), read_tokenizer(tokenizer_folder).backend)
    counting = CountingTokenizer(checker._tokenizer)
    checker._tokenizer, checker._adds_bytes = counting, False  # type: ignore[assignment]  # every token is looked at
    tokenizer = TextTokenizer.load(tokenizer_folder)
    stop = "a" + "\U0001f600" * 1023
    (a,), ids = tokenizer._encode(["a", stop], False)
    assert answers(checker, [a] * 3000, stop=[stop]) == [None] * 3000
    assert counting.num_tokens < 20 * 3000
    assert answers(checker, ids, stop=[stop]) == [None] * (len(ids) - 1) + [stop]
