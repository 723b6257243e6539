"""Pages of windows under the real planner: every read finds KV of its own prefix, and no page is lost."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rollout.core.errors import StartupError
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.messages.req_output import FinishReason
from rollout.core.sampling_params import SamplingParams
from rollout.core.specs.layer_specs import FullKV, WindowKV
from rollout.executor.input_builder import ExtendInput, build_forward_batch
from rollout.memory.cache_manager import CacheManager
from rollout.memory.sequence import CachedSequence
from rollout.memory.state_pool import SnapshotRows
from rollout.memory.window_pages import WindowPages, WindowSizes, check_window_bytes, window_sizes
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.policy import Policy, RequestQueues
from rollout.scheduler.req import Req

PAGE, CONTEXT, RUNNING, CHUNK = 4, 40, 3, 9
PROMPTS = [random.Random(seed).choices(range(2), k=CONTEXT) for seed in range(3)]
NEEDED = 3 * RUNNING + -(-CHUNK // PAGE)


def request(name: str, prompt: list[int], more: int = 1, *, arrival: int = 0, session_id: str | None = None) -> Req:
    params = SamplingParams(max_new_tokens=more)
    source = TokenizedGenerateReqInput(rid=name, input_ids=prompt, sampling_params=params, session_id=session_id)
    return Req(source, arrival=arrival, seed=0, end_ids=frozenset())


class Machine(RuleBasedStateMachine):
    """A model of the pages.  `content` maps a slot of a window to its namespace and the tokens up to its own."""

    kind: type[WindowPages] = WindowPages
    num_slots = 64
    seen: dict[str, int]

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"hits": 0, "retractions": 0, "spare": 0, "shared": 0}
        self.pages = self.kind(WindowSizes(PAGE, NEEDED + 2, NEEDED), RUNNING, CONTEXT, "cpu", keeps_prefixes=True)
        self.cache = CacheManager(
            num_slots=self.num_slots, max_requests=RUNNING, max_context=CONTEXT, device="cpu",
            disable_radix_cache=False, states=self.pages, max_pinned_tokens=30, pin_timeout=1e9,
        )  # fmt: skip
        self.queues = RequestQueues(DecodeBatch())
        self.policy = Policy(self.queues, self.cache, chunked_prefill_size=CHUNK, max_running_requests=RUNNING)
        self.content: dict[int, Any] = {}
        self.epoch = self.count = 0
        self.tokens = random.Random(1)

    @rule(
        kind=st.integers(0, 2), length=st.integers(1, 26), tail=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        more=st.integers(1, 16), session=st.booleans(),
    )  # fmt: skip
    def submit(self, kind: int, length: int, tail: list[int], more: int, session: bool) -> None:
        self.count += 1
        prompt = [*PROMPTS[kind][:length], *tail]
        name = str(self.count)
        session_id = name if session else None
        self.queues.enqueue(request(name, prompt, more, arrival=self.count, session_id=session_id))

    @precondition(lambda self: self.queues.all())
    @rule(steps=st.integers(1, 16))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.queues.all():
                self.one_step()

    def retract(self, req: Req) -> None:
        self.cache.detach(req, self.epoch)
        req.num_retractions += 1
        self.seen["retractions"] += 1

    def one_step(self) -> None:
        plan = self.policy.plan(self.epoch, self.retract)
        extends, decodes = plan.extends, plan.decodes
        slots = self.cache.extend_each(decodes.generation, decodes.inputs.pool_indices, decodes.inputs.positions)
        inputs = [
            ExtendInput(x.req.tokens(x.start, x.start + x.count), x.req.pool_index, x.start, True) for x in extends
        ]
        batch = build_forward_batch(inputs, decodes.inputs, slots, self.cache.pool)
        self.pages.prepare(batch, [item.req for item in extends], decodes.reqs)
        self.compute(batch, [(x.req, x.start, x.count) for x in extends] + [(r, r.device_len, 1) for r in decodes])
        self.seen["hits"] += sum(x.start > 0 and x.start == x.req.cached_len for x in extends)
        completed = [item.req for item in extends if item.completes]
        for item in extends:
            item.req.device_len += item.count
        going = list(decodes)
        decodes.advance()
        for req in completed:
            self.cache.share_prompt(req, self.epoch)
        self.queues.enter_launch(completed, [])
        for req in [*going, *completed]:
            req.output_ids.append(self.tokens.randrange(2))
            if len(req.output_ids) == req.sampling_params.max_new_tokens:
                req.finished = FinishReason(type="length", length=0)
                self.queues.running.remove(req)
                self.cache.detach(req, self.epoch, req.session_to_pin)
        helds = self.pages._of.values()
        self.seen["spare"] += sum(len(held.spare) for held in helds)
        self.seen["shared"] += sum(len(held.shared) for held in helds)

    def compute(self, batch: Any, spans: list[tuple[Req, int, int]]) -> None:
        table, written = batch.window.table, iter(batch.window.slots.tolist())
        for req, start, count in spans:
            for position in range(start, start + count):
                slot = next(written)
                assert slot == table[req.pool_index, position]
                self.content[slot] = (req.namespace, tuple(req.tokens(0, position + 1)))
        assert next(written, None) is None
        for req, start, count in spans:
            for position in range(max(0, start - PAGE + 1), start + count):
                found = self.content[int(table[req.pool_index, position])]
                assert found == (req.namespace, tuple(req.tokens(0, position + 1))), "the KV of another prefix is read"

    @rule()
    def refresh(self) -> None:
        self.epoch += 1
        self.cache.prefix_cache.retire(self.epoch)

    @precondition(lambda self: not self.queues.all())
    @rule()
    def flush(self) -> None:
        self.cache.flush()
        assert self.pages.rows.num_free == NEEDED + 2

    @invariant()
    def nothing_is_lost(self) -> None:
        self.cache.check()
        if not self.queues.all():
            assert self.pages.rows.num_free + self.pages.rows.num_kept == NEEDED + 2


class GivesUpTooEarly(WindowPages):
    def _give_up(self, sequence: CachedSequence, held: Any, first: int) -> None:
        super()._give_up(sequence, held, first + 1)


class NeverGivesUp(WindowPages):
    def _give_up(self, sequence: CachedSequence, held: Any, first: int) -> None:
        pass


class HandsOverPartPages(WindowPages):
    def hand_over(self, sequence: CachedSequence, cache: Any, node: Any, num_tokens: int) -> None:
        super().hand_over(sequence, cache, node, -(-num_tokens // self.page_size) * self.page_size)


def play(kind: type[WindowPages], count: int) -> dict[str, int]:
    seen = {"hits": 0, "retractions": 0, "spare": 0, "shared": 0}

    class Counted(Machine):
        def teardown(self) -> None:
            for name, value in self.seen.items():
                seen[name] += value

    Counted.kind = kind
    run_state_machine_as_test(
        Counted,
        settings=settings(
            max_examples=count, stateful_step_count=40, deadline=None, database=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    return seen


def test_what_is_read_was_written_for_that_prefix() -> None:
    seen = play(WindowPages, 150)
    assert all(seen.values()), seen


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [GivesUpTooEarly, NeverGivesUp, HandsOverPartPages])
def test_wrong_pages_are_noticed(wrong: type[WindowPages]) -> None:
    with pytest.raises((AssertionError, KeyError, BaseExceptionGroup)):
        play(wrong, 150)


def serve_one(machine: Machine, prompt: list[int]) -> None:
    machine.count += 1
    machine.queues.enqueue(request(str(machine.count), prompt, arrival=machine.count))
    while machine.queues.all():
        machine.one_step()


def test_a_page_that_is_read_stays_when_others_need_pages() -> None:
    machine = type("Roomy", (Machine,), {"num_slots": 400})()
    first = [1] * PAGE
    serve_one(machine, [*first, 0])
    reader = request("reader", [*first, 1])
    machine.cache.attach(reader, (None, 0))
    assert reader.cached_len == PAGE
    (row,) = machine.pages._readers
    for number in range(NEEDED + 2):
        serve_one(machine, [2 + number] * (PAGE + 1))
    assert machine.pages.rows.num_kept > NEEDED and machine.pages.rows.keeps(row)
    machine.cache.check()
    machine.cache.detach(reader, 0)
    for number in range(NEEDED + 2):
        serve_one(machine, [99 + number] * (PAGE + 1))
    again = request("again", [*first, 1])
    machine.cache.attach(again, (None, 0))
    assert again.cached_len == 0, "the least recently used page goes once nobody reads it"


def verify(machine: Machine, req: Req, count: int) -> None:
    """Compute `count` tokens of a request that decodes alone, of which all stay."""
    req.output_ids += [machine.tokens.randrange(2) for _ in range(count - 1)]
    start = req.device_len
    slots = machine.cache.extend_apart(torch.full((count,), req.pool_index), torch.arange(start, start + count))
    given = ExtendInput(req.tokens(start, start + count), req.pool_index, start, count)
    batch = build_forward_batch([given], DecodeBatch().inputs, slots[:0], machine.cache.pool)
    machine.pages.prepare(batch, [req], [], 1)
    machine.compute(batch, [(req, start, count)])
    machine.queues.running.advance_by(np.array([count]))
    req.output_ids.append(machine.tokens.randrange(2))


def test_a_request_has_three_pages_where_its_drafts_begin_them() -> None:
    machine = Machine()
    req = request("drafted", [1] * 6, 30)
    machine.queues.enqueue(req)
    machine.one_step()
    while req.device_len < 30:
        verify(machine, req, 3)  # up to the first token of a page
        assert len(machine.pages._of[req].own) <= 3, req.device_len
        machine.cache.check()
        while req.device_len % PAGE != 2:
            machine.one_step()


def test_sizes_of_windows_follow_the_largest_window() -> None:
    kept = [FullKV(8, 64), WindowKV(8, 64, 128), WindowKV(8, 64, 100)]
    limits = {"context_length": 4096, "step_tokens": 2048, "max_running_requests": 10}
    sizes = window_sizes(kept, **limits)
    assert sizes == WindowSizes(page_size=128, num_pages=56, max_needed=46) and sizes.num_slots == 56 * 128
    assert window_sizes([FullKV(8, 64), WindowKV(8, 64, 129)], **limits) == WindowSizes(256, 48, 38)
    assert window_sizes([WindowKV(8, 64, 4000)], **limits) is None, "as long as a context"
    assert window_sizes([FullKV(8, 64), None], **limits) is None


def test_pages_that_do_not_fit() -> None:
    check_window_bytes(2**20, 2**20)
    with pytest.raises(StartupError, match=r"^3 MiB for the KV of layers with a window do not fit into 2 MiB: .*$"):
        check_window_bytes(3 * 2**20, 2 * 2**20)


def test_pinned_pages_go_last() -> None:
    rows = SnapshotRows(0, 1)

    class Keeper:
        def __init__(self) -> None:
            self.states: dict[int, int] = {}
            self.pin_count = 1

    row, keeper = rows.take(drops=False), Keeper()
    assert row == 0 and rows.keep(row, keeper, 4)
    assert rows.take(drops=True) is None
    assert rows.take(drops=True, even_pinned=True) == 0 and not keeper.states


def test_a_table_has_room_for_every_position() -> None:
    pages = WindowPages(WindowSizes(PAGE, 8, 6), 2, CONTEXT, torch.device("cpu"), keeps_prefixes=True)
    assert pages.table.shape[1] >= CONTEXT + PAGE and np.all(pages.table[:-1].numpy() == 0)
