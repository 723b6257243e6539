"""The cost of a request that joins or leaves the decode batch: nothing for the prompts and lists of the others.

Counted in executed instructions of Python and in bytes that numpy takes, not in seconds.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.kernels.build import load_kernels
from rollout.sampling.base import SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.sampling.native_sampler import NativeSampler
from rollout.sampling.row_lists import RowLists
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.records import SampledRows
from rollout.scheduler.req import Req
from rollout.scheduler.stop import StopChecker
from tests.counted_costs import instructions, taken
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness

VOCAB = 5000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m")


# --- samples of one prompt ---------------------------------------------------------------------------------------


def test_samples_of_a_prompt_cost_the_same_however_long_it_is(folder: Path) -> None:
    """C5: arrays that depend on the prompt are made once for all of its samples."""

    def cost(length: int, samples: int) -> tuple[int, int]:
        harness = Harness(folder, max_total_tokens=200_000)
        siblings = [(f"s{number}", number) for number in range(samples)]
        bias = dict.fromkeys(range(300), 0.5)
        params = SamplingParams(
            max_new_tokens=2, repetition_penalty=1.2, logit_bias=bias, stop_token_ids=list(range(200, 300))
        )
        message = TokenizedGenerateReqInput(
            rid="first", input_ids=[5] * length, sampling_params=params, siblings=siblings
        )
        found = taken(lambda: harness.scheduler._dispatch(message))
        reqs = list(harness.scheduler.queues.waiting)
        assert len(reqs) == samples + 1 and len({id(req.sampling_row.shared) for req in reqs}) == 1
        assert len({id(req.end_ids) for req in reqs}) == 1
        return found, instructions(lambda: [req.token_array(0, length) for req in reqs])

    short, long = (cost(length, 40) for length in (100, 20_000))
    assert long[0] < short[0] + 20_000 and long[1] == short[1]


# --- the batch that decodes --------------------------------------------------------------------------------------


class Decoding:
    """Requests that decode, without a model: they join, leave and get tokens."""

    def __init__(self, num_rows: int, **params: Any) -> None:
        self.batch = DecodeBatch()
        self.lists = RowLists([(400, 400, 40_000)] * (num_rows + 1))
        self.params = SamplingParams(max_new_tokens=1000, **params)
        self.stop = StopChecker((1,), None)
        self.free = list(range(num_rows + 1))
        self.count = 0

    def request(self, length: int) -> Req:
        self.count += 1
        rng = random.Random(self.count)
        prompt = rng.choices(range(VOCAB), k=length)
        made = TokenizedGenerateReqInput(rid=str(self.count), input_ids=prompt, sampling_params=self.params)
        req = Req(made, arrival=self.count, seed=self.count, end_ids=self.stop.end_ids(made))
        req.pool_index, req.device_len = self.free.pop(), length
        req.token_array(0, length)  # as the prefix cache asks for when it is admitted
        return req

    def join(self, req: Req) -> SampledRows:
        self.batch.join([req])
        req.output_ids.append(self.count % VOCAB)
        return self.rows()

    def leave(self, req: Req) -> SampledRows:
        self.batch.remove(req)
        self.free.append(req.pool_index)
        return self.rows()

    def rows(self) -> SampledRows:
        """Return the rows as a step makes them, with all that its sampler reads."""
        rows = SampledRows(self.batch.reqs, self.stop, VOCAB, "cpu", self.lists)
        rows.info.update_histories()
        assert rows.info.operands
        return rows


LISTS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.05},
    {"frequency_penalty": 0.5},
    {"logit_bias": dict.fromkeys(range(400), 0.5)},
    {"min_new_tokens": 5, "stop_token_ids": list(range(100, 400))},
    {},
]


@pytest.mark.parametrize("params", LISTS, ids=lambda params: next(iter(params), "plain"))
def test_who_joins_or_leaves_costs_nothing_for_the_lists_of_others(params: dict[str, Any]) -> None:
    """C5: prompts, biases and end tokens of other requests cost nothing."""

    def cost(length: int, rows: int = 64) -> tuple[int, int]:
        made = Decoding(rows, **params)
        for _ in range(rows):
            made.join(made.request(length))
        newcomer = made.request(100)
        joins = taken(lambda: made.join(newcomer))
        return joins, taken(lambda: made.leave(made.batch.reqs[3]))

    short, long = cost(100), cost(10_000)
    assert all(more <= less + 4096 for less, more in zip(short, long))
    assert all(number < 150_000 for number in long), "64 rows with lists of 400 would take 200,000 bytes and more"


@pytest.mark.parametrize("params", LISTS, ids=lambda params: next(iter(params), "plain"))
def test_instructions_of_a_join_do_not_grow_with_prompts(params: dict[str, Any]) -> None:
    """C5: the newcomer's own prompt and the prompts of others do not count."""

    def cost(length: int) -> tuple[int, int]:
        made = Decoding(20, **params)
        for _ in range(20):
            made.join(made.request(length))
        newcomer = made.request(length)
        return instructions(lambda: made.join(newcomer)), instructions(lambda: made.leave(newcomer))

    cost(50)
    assert cost(50) == cost(5000)


def test_a_join_to_256_rows_of_long_prompts_executes_as_much_as_one_to_short_prompts() -> None:
    """C5: a join to 256 rows with prompts of 32,768 tokens took 1.5 s."""

    def cost(num_rows: int, length: int) -> int:
        made = Decoding(num_rows, repetition_penalty=1.05)
        made.batch.join([made.request(length) for _ in range(num_rows)])
        made.rows()
        made.leave(made.batch.reqs[0])
        newcomer = made.request(length)
        return instructions(lambda: made.join(newcomer))

    cost(16, 100)
    assert cost(256, 100) == cost(256, 32_768)
    assert cost(256, 100) < 256 * 250, "a row that stays takes about 180 instructions of its own"


def test_stop_tokens_of_many_rows_are_not_collected_again_and_again() -> None:
    """C5: with very many stop tokens each row is checked by itself, with the same result."""
    checker = StopChecker((1,), None)
    for count in (3, 300):
        made = Decoding(40)
        reqs = []
        for number in range(40):
            made.params = SamplingParams(max_new_tokens=100, stop_token_ids=range(number, number + count))
            reqs.append(made.request(5))
            made.join(reqs[-1])
        rows = SampledRows(reqs, checker, VOCAB)
        assert (rows._end_ids is None) == (count == 300)
        tokens = torch.full((40,), 345)  # ends those whose stop tokens reach so far
        tokens[7] = 1  # the end of text
        epoch: Any = object()
        rows._marked_epoch = epoch
        none = torch.zeros(0)
        sampled = SampledTokens(tokens, torch.zeros(40), none, none, none, torch.zeros(40).long(), none, none)
        ended = rows.enter(sampled, epoch, (), ())
        expected = {7} if count == 3 else {7, *(number for number in range(40) if number <= 345 < number + count)}
        assert {reqs.index(req) for req in ended} == expected


# --- rows in places ----------------------------------------------------------------------------------------------


def mixed_row(rng: random.Random) -> SamplingRow:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        presence_penalty=rng.choice([0.0, -0.3]),
        min_new_tokens=rng.choice([0, 6]),
        logit_bias={token: rng.uniform(-3, 3) for token in rng.sample(range(VOCAB), rng.choice([0, 3]))},
    )
    prompt = rng.choices(range(VOCAB), k=rng.randrange(1, 60))
    chosen = rng.sample(range(VOCAB), rng.choice([0, 0, 2]))
    return SamplingRow(
        params, rng.randrange(2**64), rng.sample(range(VOCAB), 3), prompt, [], top_logprobs=2, chosen_ids=chosen
    )


def bits(sampler: NativeSampler, logits: torch.Tensor, info: SamplingBatchInfo) -> list[torch.Tensor]:
    positions = torch.tensor([len(row.output_ids) for row in info.rows], dtype=torch.int64)
    tokens = sampler.sample(logits, info, positions)
    return [tokens.token_ids, tokens.logprobs, tokens.top_logprobs, tokens.chosen_logprobs]


def fresh(rows: Sequence[SamplingRow]) -> SamplingBatchInfo:
    """Return the sampling info of the same rows, as if they had never been in a batch."""
    return SamplingBatchInfo([dataclasses.replace(row) for row in rows], VOCAB)


def play(seed: int, lists: RowLists) -> bool:
    """Let rows come and go, and use places again; tell whether each step gave the results of rows with own lists."""
    rng, sampler = random.Random(seed), NativeSampler()
    torch.manual_seed(seed)
    places = list(range(len(lists.places)))
    rows: list[tuple[int, SamplingRow]] = []
    retracted: list[SamplingRow] = []
    for _ in range(40):
        for _ in range(rng.randrange(3)):
            if places:
                row = retracted.pop() if retracted and rng.random() < 0.5 else mixed_row(rng)
                rows.append((places.pop(rng.randrange(len(places))), row))
        while rows and rng.random() < 0.3:
            place, row = rows.pop(rng.randrange(len(rows)))
            places.append(place)
            retracted.append(row)
        batch = [row for _, row in rows]
        info = SamplingBatchInfo(batch, VOCAB, "cpu", lists, [place for place, _ in rows])
        for _ in range(rng.randrange(4)):
            logits = 4 * torch.randn(len(rows), VOCAB)
            found, expected = bits(sampler, logits, info), bits(sampler, logits, fresh(batch))
            if not all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(found, expected)):
                return False
            for row, token in zip(batch, found[0].tolist()):
                row.output_ids.append(token)
    return True


@pytest.fixture(scope="module")
def kernels() -> None:
    if not load_kernels().available:
        pytest.skip("no compiled sampler")


def test_lists_in_places_that_are_used_again_give_what_lists_of_their_own_give(kernels: None) -> None:
    """C5: to the bit, also of rows that were retracted and come back to the same place, or to another."""
    for seed in range(6):
        assert play(seed, RowLists([(5, 5, 300)] * 6))


def test_rows_that_do_not_fit_into_their_places_have_lists_of_their_own(kernels: None) -> None:
    """C5: prompts of up to 59 tokens, biases of 3, and outputs that grow, in places of 64, 2 and less."""
    for widths in ((2, 5, 300), (5, 1, 300), (5, 5, 64), (0, 0, 0)):
        assert play(3, RowLists([widths] * 6))


class Forgetful(RowLists):
    """Takes any place for the row's that was entered there."""

    def enter(self, index: int, lists: Any, values: Any) -> Any:
        place = self.places[index] or super().enter(index, lists, values)
        self.places[index] = place
        return place


def test_a_place_that_is_taken_for_that_of_another_row_is_noticed(kernels: None) -> None:
    assert not all(play(seed, Forgetful([(5, 5, 300)] * 6)) for seed in range(3))


def test_nothing_of_requests_that_ended_is_kept_at_rest(folder: Path) -> None:
    """C5: an engine at rest keeps neither their rows nor the memory of their lists."""
    harness = Harness(folder)
    harness.generate([[3] * 20, [4] * 20], params={"repetition_penalty": 1.2, "max_new_tokens": 4})
    steps = harness.scheduler._steps
    harness.tick()
    assert steps._decoding is None and not steps._lists.is_used
