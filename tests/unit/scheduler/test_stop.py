"""Stop strings over tokens that are parts of characters: the quick check of a token never hides a match."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.scheduler import stop
from rollout.scheduler.req import Req
from rollout.scheduler.stop import StopChecker
from rollout.text.tokenizer_files import read_tokenizer
from tests.tiers import examples
from tests.tiny_tokenizer import write_tiny_tokenizer

TEXTS = st.text("abEND\n é😀", min_size=1, max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))).backend


class LooksAtEveryToken(StopChecker):
    """Searches after every token: the definition."""

    def _may_end_stop(self, token_id: int, params: SamplingParams) -> bool:
        return True


class ForgetsHalfCharacters(StopChecker):
    """Looks for the last character of a stop string in tokens that hold a part of it only."""

    def _may_end_stop(self, token_id: int, params: SamplingParams) -> bool:
        text = self._token_text(token_id)
        return any(stop[-1] in text for stop in params.stop)


def matches(checker: StopChecker, token_ids: list[int], **params: object) -> list[object]:
    """Return what `checker` says after each of the tokens."""
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
