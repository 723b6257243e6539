"""`SampleText` of a reader that begins in the middle: it shows what the readers before it have not seen."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.messages.req_output import FinishedRecord, FinishReason, ReqOutput
from rollout.core.sampling_params import SamplingParams
from rollout.tokenizer_manager.sample import SampleRecord
from rollout.tokenizer_manager.sample_text import SampleText

TEXT = "one EN"  # "EN" may begin the stop string


class Letters:
    """A tokenizer with a token for each character."""

    @staticmethod
    def decode(ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def ended(reason: FinishReason, *, alone: bool) -> SampleRecord:
    """Return the record of a sample of which the end came with the last token, or `alone`."""
    source = TokenizedGenerateReqInput(rid="a", input_ids=[1], sampling_params=SamplingParams(stop=["END"]))
    record = SampleRecord(source, 0.0, "v")
    parts = [TEXT, ""] if alone else [TEXT[:-1], TEXT[-1]]
    for index, part in enumerate(parts):
        finished = FinishedRecord(reason=reason) if index else None
        ids, total = list(map(ord, part)), len(record.output_ids) + len(part)
        record.append(
            ReqOutput(rid="a", token_ids=ids, num_output_tokens=total, weight_version="v", finished=finished), 0.0
        )
    return record


@pytest.mark.parametrize(
    ("reason", "alone", "rest"),
    [
        (FinishReason(type="abort", message="m"), True, "EN"),
        (FinishReason(type="length", length=6), False, ""),
    ],
)
def test_an_end_that_came_alone_shows_the_text_that_was_held_back(reason: FinishReason, alone: bool, rest: str) -> None:
    tokenizer: Any = Letters()
    text = SampleText(ended(reason, alone=alone), tokenizer)
    begin = text.begin_at(len(TEXT))
    assert text.update()[begin:] == rest
    text = SampleText(ended(reason, alone=alone), tokenizer)
    begin = text.begin_at(5)
    assert text.update()[begin:] == "EN", "a stop string may have begun with the fifth token"


class Bytes:
    """A tokenizer with a token for each byte, whose decoder takes a run of them as a whole, as Llama's does."""

    @staticmethod
    def decode(ids: list[int], **_: Any) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)


def grown(record: SampleRecord, ids: list[int]) -> SampleRecord:
    record.append(
        ReqOutput(rid="a", token_ids=ids, num_output_tokens=len(record.output_ids) + len(ids), weight_version="v"), 0.0
    )
    return record


@pytest.mark.parametrize("at_once", [2, 3, 7, 30])
def test_the_text_that_tokens_show_does_not_depend_on_how_they_came(at_once: int) -> None:
    """Else a reader that goes on at a token would see characters twice, or not at all."""
    tokenizer: Any = Bytes()
    ids = list("Wörter 😀語😀, 😀😀 und 語語語語 viele Zeichen 😀".encode())
    source = TokenizedGenerateReqInput(rid="a", input_ids=[1], sampling_params=SamplingParams())
    one, some = SampleRecord(source, 0.0, "v"), SampleRecord(source, 0.0, "v")
    text_of_one, text_of_some = SampleText(one, tokenizer), SampleText(some, tokenizer)
    for count in range(1, len(ids) + 1):
        shown = SampleText(grown(one, ids[count - 1 : count]), tokenizer).begin_at(count)
        assert len(text_of_one.update()) == shown, count
        if count % at_once == 0:
            grown(some, ids[count - at_once : count])
            assert text_of_some.update() == text_of_one.update(), count
