"""The arrays of `DecodeBatch` against the requests, over any order of joining, leaving and stepping."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.messages.req_output import FinishReason
from rollout.core.sampling_params import SamplingParams
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.req import Req
from tests.decode_batch_faults import ForgetsToAdvance, ForgetsWhoLeft
from tests.tiers import examples

CAPACITY = 6
ACTIONS = st.one_of(
    st.tuples(st.just("join"), st.integers(1, 3)),
    st.tuples(st.just("step"), st.integers(0, 99)),
    st.tuples(st.just("finish"), st.integers(0, CAPACITY)),
    st.tuples(st.just("remove"), st.integers(0, CAPACITY)),
    st.tuples(st.just("clear"), st.just(0)),
)


class Stepper:
    """Requests with one prompt token each, stepped as the scheduler steps them."""

    def __init__(self) -> None:
        self.batch = DecodeBatch()
        self.made = 0

    def act(self, action: str, value: int) -> None:
        reqs = list(self.batch)
        if action == "join":
            self.join(min(value, CAPACITY - len(reqs)))
        elif action == "step" and reqs:
            self.step([value + row for row in range(len(reqs))])
        elif action == "finish" and reqs:
            reqs[value % len(reqs)].finished = FinishReason(type="abort")
            self.batch.drop_finished()
        elif action == "remove" and reqs:
            self.batch.remove(reqs[value % len(reqs)])
        elif action == "clear":
            self.batch.remove(*self.batch.reqs)

    def join(self, count: int) -> None:
        joining = [self.request() for _ in range(count)]
        self.batch.join(joining)
        for req in joining:
            req.output_ids.append(7)  # the token of the step that completed the prompt

    def request(self) -> Req:
        self.made += 1
        params = SamplingParams(max_new_tokens=100)
        source = TokenizedGenerateReqInput(rid=str(self.made), input_ids=[5] * self.made, sampling_params=params)
        req = Req(source, arrival=self.made, seed=0, end_ids=frozenset())
        req.device_len, req.pool_index = self.made, self.made + 10
        return req

    def step(self, token_ids: list[int]) -> None:
        assert not self.batch.advance()
        for req, token_id in zip(self.batch, token_ids):
            req.output_ids.append(token_id)


@given(actions=st.lists(ACTIONS, max_size=25))
@settings(deadline=None, max_examples=examples(150))
def test_arrays_follow_the_requests(actions: list[tuple[str, int]]) -> None:
    stepper = Stepper()
    for action, value in actions:
        before, generation = list(stepper.batch), stepper.batch.generation
        stepper.act(action, value)
        stepper.batch.check()
        inputs = stepper.batch.inputs
        assert all(x.is_contiguous() for x in (inputs.pool_indices, inputs.positions, inputs.seq_lens))
        assert list(stepper.batch) == before or stepper.batch.generation > generation


def test_inputs_of_the_next_step() -> None:
    stepper = Stepper()
    stepper.join(3)
    stepper.step([20, 21, 22])
    stepper.batch.remove(stepper.batch.reqs[1])
    inputs = stepper.batch.inputs
    assert inputs.pool_indices.tolist() == [11, 13]
    assert inputs.positions.tolist() == [2, 4]  # prompts of 1 and 3 tokens, and one output token with KV
    assert inputs.seq_lens.tolist() == [3, 5]
    assert inputs.rows.tolist() == [0, 1]
    assert stepper.batch.output_counts.tolist() == [2, 2]


def test_lengths_are_counted_without_the_tokens() -> None:
    """Two steps are launched before the first of them has reached the host."""
    stepper = Stepper()
    stepper.join(2)
    first = stepper.batch.reqs[0]
    stepper.batch.advance()
    stepper.batch.check(in_flight=stepper.batch.reqs)
    assert (first.device_len, first.num_tokens, first.recorded_len) == (2, 2, 1)
    stepper.batch.remove(first)
    assert (first.device_len, first.num_tokens, first.recorded_len) == (2, 2, 1)
    assert stepper.batch.inputs.positions.tolist() == [3]
    with pytest.raises(AssertionError, match="arrays and the requests differ"):
        stepper.batch.check()


def test_the_last_token_of_a_request_is_known_when_it_is_launched() -> None:
    stepper = Stepper()
    stepper.join(2)
    for _ in range(98):
        assert not stepper.batch.advance()
    assert stepper.batch.advance() == [0, 1]


@pytest.mark.parametrize("wrong", [ForgetsWhoLeft, ForgetsToAdvance])
def test_check_catches_arrays_that_went_astray(wrong: type[DecodeBatch]) -> None:
    stepper = Stepper()
    stepper.batch = wrong()
    stepper.join(3)
    stepper.batch.check()
    with pytest.raises(AssertionError, match="arrays and the requests differ"):
        stepper.step([1, 2, 3])
        stepper.batch.check()
        stepper.batch.remove(stepper.batch.reqs[0])
        stepper.batch.check()


def test_a_request_whose_prompt_is_not_computed_cannot_join() -> None:
    stepper = Stepper()
    req = stepper.request()
    req.device_len -= 1
    with pytest.raises(AssertionError, match="once it is prefilled"):
        stepper.batch.join([req])
