"""`NgramDrafter` proposes what followed the longest match, and keeps no more than it may."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from rollout.core.prompt import Prompt
from rollout.drafts import ngram
from rollout.drafts.base import Draft
from rollout.drafts.ngram import NgramDrafter
from rollout.drafts.plain_texts import PlainTexts
from rollout.kernels.build import load_kernels


@dataclass(eq=False)
class Sequence:
    prompt: Prompt
    output_ids: list[int] = field(default_factory=list)


def sequence(prompt: list[int], output: list[int] | None = None) -> Sequence:
    return Sequence(Prompt(prompt), list(output or []))


def propose(drafter: NgramDrafter, text: Sequence, most: int) -> Draft:
    (draft,) = drafter.propose([(text, most)])
    return draft


def plainly(prompt: list[int], outputs: list[list[int]], own: int, shortest: int, most: int) -> tuple[int, set]:
    """Return the longest match of the end of a text anywhere before, and all that followed matches of that length."""
    text = prompt + outputs[own]
    best, found = 0, set()
    for other in [prompt, *(prompt + output for output in outputs)]:
        for end in range(1, len(other)):
            length = 0
            while length < min(end, len(text), 32) and other[end - 1 - length] == text[-1 - length]:
                length += 1
            if length >= shortest and (other is not prompt or end < len(prompt)):
                proposed = tuple(other[end : end + most])
                if length > best:
                    best, found = length, set()
                if length == best:
                    found.add(proposed)
    return best, found


def test_a_repeated_text_is_continued() -> None:
    drafter = NgramDrafter(shortest=3)
    text = sequence([1, 2, 3, 4, 5, 6, 9, 9], [2, 3, 4])
    draft = propose(drafter, text, 3)
    assert (list(draft.token_ids), draft.evidence) == ([5, 6, 9], 3)
    text.output_ids += [5, 6]
    assert list(propose(drafter, text, 2).token_ids) == [9, 9]
    assert not propose(drafter, text, 0).token_ids


def test_the_longest_match_wins_over_a_newer_one() -> None:
    drafter = NgramDrafter(shortest=2)
    text = sequence([7, 1, 2, 3, 50, 8, 2, 3, 60, 7, 1, 2, 3])
    assert propose(drafter, text, 1) == ([50], 4)


def test_samples_of_one_prompt_draft_from_one_another() -> None:
    drafter = NgramDrafter(shortest=3)
    first, second = sequence([1, 2, 3]), sequence([1, 2, 3])
    propose(drafter, first, 4)
    first.output_ids += [10, 11, 12, 13, 14]
    propose(drafter, first, 4)
    second.output_ids += [10]
    assert list(propose(drafter, second, 4).token_ids) == [11, 12, 13, 14]
    other = sequence([1, 2, 4], [10])
    assert not propose(drafter, other, 4).token_ids


def test_every_proposal_follows_a_longest_match() -> None:
    rng = random.Random(3)
    for shortest in (1, 2, 3):
        drafter = NgramDrafter(shortest)
        prompt = [rng.randrange(4) for _ in range(rng.randint(1, 30))]
        texts = [sequence(prompt) for _ in range(3)]
        for text in texts:
            propose(drafter, text, 1)
        for _ in range(40):
            own = rng.randrange(3)
            texts[own].output_ids.append(rng.randrange(3))
            draft = propose(drafter, texts[own], 5)
            best, found = plainly(prompt, [text.output_ids for text in texts], own, shortest, 5)
            if draft.token_ids:
                assert draft.evidence <= best
                assert draft.evidence < best or tuple(draft.token_ids) in found
            else:
                assert best < shortest


def test_an_index_goes_with_its_last_request() -> None:
    drafter = NgramDrafter()
    texts = [sequence(list(range(50)), [1, 2, 3]) for _ in range(2)]
    for text in texts:
        propose(drafter, text, 4)
    drafter.forget(texts[0])
    assert drafter.num_tokens > 50
    drafter.forget(texts[1])
    drafter.forget(texts[1])
    assert drafter.num_tokens == 0


def test_history_is_bounded_and_drafts_for_later_samples() -> None:
    drafter = NgramDrafter(history_tokens=200)
    for start in range(0, 500, 50):
        text = sequence(list(range(start, start + 50)), [7, 8, 9, 10, 11])
        propose(drafter, text, 4)
        drafter.forget(text)
        assert drafter.num_tokens <= 200
    again = sequence(list(range(450, 500)), [7, 8, 9])
    assert list(propose(drafter, again, 4).token_ids) == [10, 11]


def test_samples_that_follow_one_another_without_end_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_FULL", 100)
    drafter = NgramDrafter(history_tokens=300)
    running: deque[Sequence] = deque()
    for _ in range(50):
        running.append(sequence([1, 2, 3], [4, 5, 6, 7, 8]))
        propose(drafter, running[-1], 4)
        if len(running) == 3:
            drafter.forget(running.popleft())
        assert drafter.num_tokens <= 200
    assert list(propose(drafter, sequence([1, 2, 3], [4, 5, 6]), 2).token_ids) == [7, 8]


def test_prompts_of_one_key_leave_no_history_behind() -> None:
    drafter = NgramDrafter(history_tokens=80)
    for length in (10, 200, 30, 30):
        text = sequence([length] * length, [7, 8, 9])
        if length != 30:
            text.prompt.__dict__["key"] = 1
        propose(drafter, text, 4)
        drafter.forget(text)
    other = sequence(list(range(60)))
    propose(drafter, other, 4)
    drafter.forget(other)
    assert drafter.num_tokens <= 80


def test_compiled_texts_give_the_drafts_of_plain_ones() -> None:
    status = load_kernels()
    if not status.available:
        pytest.skip(status.reason)
    rng = random.Random(5)
    for shortest in (1, 3):
        forms = [NgramDrafter(shortest, 300, texts) for texts in (None, PlainTexts(shortest))]
        running: list[Sequence] = []
        seen = [0, 0]
        for _ in range(400):
            if len(running) < 6:
                kind = rng.randrange(4)
                tokens = range(7 * kind, 7 * kind + 40) if kind else [rng.randrange(5) for _ in range(rng.randrange(4))]
                running.append(sequence(list(tokens)))
            for text in running:
                text.output_ids += [rng.choice((1, 2, 1 << 40)) for _ in range(rng.randrange(4))]
            asks = [(text, rng.randrange(6)) for text in rng.sample(running, rng.randint(1, len(running)))]
            compiled, plain = (form.propose(asks) for form in forms)
            assert compiled == plain
            seen[0] += len(plain)
            seen[1] += sum(len(draft.token_ids) for draft in plain)
            if rng.random() < 0.2:
                gone = running.pop(rng.randrange(len(running)))
                for form in forms:
                    form.forget(gone)
            assert forms[0].num_tokens == forms[1].num_tokens
        assert seen[1] > seen[0] > 800
