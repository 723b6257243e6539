"""Engines that break one rule each, which the fuzz must notice.

Each is a context in which the engine's own code is replaced; nothing else of the engine or of the fuzz changes.  The
right engine computes before what each request gets alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from capture.slot_store import RouteSlotStore
from rollout.control import kv_age, weight_control
from rollout.engine import build
from rollout.memory.cache_manager import CacheManager
from rollout.memory.kv_events import KVEvents
from rollout.memory.kv_pool import SlotAllocator
from rollout.memory.radix_cache import RadixCache
from rollout.memory.session_pins import SessionPins
from rollout.memory.state_rows import StateRows
from rollout.memory.window_pages import WindowPages
from rollout.model.model_state import ModelState
from rollout.sampling import batch_info
from rollout.sampling.base import SampledTokens, Sampler
from rollout.sampling.batch_info import SamplingBatchInfo
from rollout.scheduler import step as step_module
from rollout.scheduler.records import RecordReader, SampledRows
from rollout.scheduler.req import Req, VersionMarks
from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.serving_state import ServingState
from rollout.scheduler.step import StepRunner
from rollout.scheduler.stop import StopChecker
from tests.decode_batch_faults import ForgetsToAdvance, ForgetsWhoLeft
from tests.faults.wrong_engines import recomputes_routes_after_a_retraction
from tests.mixed.engine import Engine
from tests.mixed.play import MixedFailed, play
from tests.mixed.schedule import Schedule, schedule_of
from tests.mixed.zoo import Prefixes, Zoo

Context = AbstractContextManager[Any]
Wrong = Callable[[], Context]
WRONG_ENGINES: dict[str, Wrong] = {}
_PREFIXES: dict[str, Prefixes] = {}
"""The engines that are wrong only with models which find prefixes in one way."""


def _enter(wrong: Wrong) -> Wrong:
    """Enter the decorated engine in the list."""
    WRONG_ENGINES[wrong.__name__] = wrong
    return wrong


def _with(prefixes: Prefixes) -> Callable[[Wrong], Wrong]:
    def enter(wrong: Wrong) -> Wrong:
        _PREFIXES[wrong.__name__] = prefixes
        return _enter(wrong)

    return enter


@contextmanager
def _replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes for a while; each replacement is an owner, a name and a value."""
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def schedules_until_noticed(name: str, zoo: Zoo, most: int) -> tuple[int, str | None]:
    """Return how many schedules it takes to notice an engine, and the failure; None: no failure in the first `most`."""
    wrong, prefixes = WRONG_ENGINES[name], _PREFIXES.get(name)
    shapes = [shape for shape in zoo.shapes if prefixes in (None, shape.prefixes)]
    for seed in range(most):
        schedule = schedule_of(seed, shapes)
        play(schedule, zoo)
        noticed = notices(wrong, schedule, zoo)
        if noticed is not None:
            return seed + 1, noticed
    return most, None


def notices(wrong: Wrong, schedule: Schedule, zoo: Zoo) -> str | None:
    with wrong():
        try:
            play(schedule, zoo)
        except MixedFailed as failure:
            return str(failure).partition("\nat action")[0]
    return None


# --- KV slots ------------------------------------------------------------------------------------------------------


@_enter
def frees_a_slot_of_the_tree() -> Context:
    """Free a slot that the tree owns when a mask over the limit ends a request at its first token after a retraction.

    The assertions that would notice are replaced.
    """

    def recorded_len(self: Req) -> int:
        return min(self.device_len, self.num_tokens - bool(self.output_ids))

    detach = CacheManager.detach

    def wrong(self: CacheManager, req: Req, *arguments: Any) -> None:
        lost = max(0, req.cached_len - recorded_len(req)) if req.pool_index != -1 else 0
        slots = self.slots(req, req.cached_len - lost, req.cached_len).clone() if lost else None
        detach(self, req, *arguments)
        if slots is not None:
            self.allocator.free(slots)

    return _replaced(
        (CacheManager, "detach", wrong),
        (CacheManager, "require_accounted", lambda self: None),
        (SlotAllocator, "_move", lambda *_: None),
    )


@_enter
def keeps_the_slots_of_the_aborted() -> Context:
    detach = CacheManager.detach

    def wrong(self: CacheManager, req: Req, *arguments: Any) -> None:
        if req.finished is None or req.finished.type != "abort":
            detach(self, req, *arguments)

    return _replaced((CacheManager, "detach", wrong))


@_enter
def keeps_prefixes_over_a_flush() -> Context:
    def wrong(self: CacheManager) -> None:
        self._free_ahead()

    return _replaced((CacheManager, "flush", wrong))


@_enter
def keeps_pins_of_sessions_that_ended() -> Context:
    def wrong(self: SessionPins, session_id: str) -> bool:
        return self._pins.pop(session_id, None) is not None

    return _replaced((SessionPins, "drop", wrong))


# --- prefixes ------------------------------------------------------------------------------------------------------


@_enter
def finds_prefixes_of_other_salts() -> Context:
    root = RadixCache._root
    return _replaced((RadixCache, "_root", lambda self, namespace: root(self, (None, namespace[1]))), *_NO_EVENTS)


def _nothing(*_: Any) -> None:
    """Stand in for the events of a tree without namespaces, and for their check."""


_NO_EVENTS = ((build, "KVEvents", _nothing), (Engine, "check_events", _nothing))


@_enter
def finds_prefixes_of_older_weights() -> Context:
    root = RadixCache._root
    return _replaced(
        (RadixCache, "_root", lambda self, namespace: root(self, (namespace[0], 0))),
        (RadixCache, "retire", _nothing),
        (RadixCache, "drop_retired", _nothing),
        *_NO_EVENTS,
    )


@_with("snapshots")
def goes_on_from_another_state() -> Context:
    """Begin a prefix hit of a model with recurrent layers without their state."""
    begin = StateRows.begin
    return _replaced((StateRows, "begin", lambda self, req, _: begin(self, req, -1)))


@_with("pages")
def goes_on_without_the_page() -> Context:
    """Begin a prefix hit of a model with windows without the KV in them."""
    begin = WindowPages.begin
    return _replaced((WindowPages, "begin", lambda self, req, _: begin(self, req, -1)))


# --- records -------------------------------------------------------------------------------------------------------


@_enter
def drops_a_row_of_routes() -> Context:
    """Drop the last row of routes of each step with several."""
    write = RouteSlotStore.write

    def wrong(self: RouteSlotStore, slots: torch.Tensor, rows_TLK: torch.Tensor) -> None:
        count = max(1, len(slots) - 1)
        write(self, slots[:count], rows_TLK[:count])

    return _replaced((RouteSlotStore, "write", wrong))


_enter(recomputes_routes_after_a_retraction)


@_enter
def returns_the_mask_of_another_token() -> Context:
    append = SampledRows._append_masks

    def wrong(self: SampledRows, *arguments: Any) -> Any:
        found = append(self, *arguments)
        for row in self._mask_rows:
            kept = self.reqs[row].output.kept_ids
            kept[-1:] = kept[-2:-1] or kept[-1:]
        return found

    return _replaced((SampledRows, "_append_masks", wrong))


@_enter
def returns_the_score_of_another_row() -> Context:
    append = SampledRows._append_logprobs

    def wrong(self: SampledRows, tokens: Any, ended: Any) -> None:
        append(self, replace(tokens, logprobs=tokens.logprobs.roll(1)), ended)

    return _replaced((SampledRows, "_append_logprobs", wrong))


@_enter
def goes_on_after_the_end() -> Context:
    """Append what a step in flight sampled for a request that has ended."""
    enter = SampledRows.enter
    return _replaced(
        (SampledRows, "enter", lambda self, tokens, epoch, last, ended: enter(self, tokens, epoch, last, ()))
    )


@_enter
def labels_tokens_when_they_are_finished() -> Context:
    """Take the label of tokens when their step is finished, not when it was launched."""
    finish = StepRunner.finish

    def wrong(self: StepRunner, step: Any, phase: Any) -> Any:
        return finish(self, step._replace(epoch=self._runner.state.epoch), phase)

    return _replaced((StepRunner, "finish", wrong))


@_enter
def forgets_new_names_of_weights() -> Context:
    """Keep the label under which the weights were committed, even after a rename."""
    note = VersionMarks.note

    def wrong(self: VersionMarks, epoch: Any, length: int) -> None:
        if not self._marks or self._marks[-1][1] != epoch.weight_epoch:
            note(self, epoch, length)

    return _replaced((VersionMarks, "note", wrong))


@_enter
def sends_tokens_twice() -> Context:
    """Send the newest token of a stream again, with the next one."""
    output = RecordReader.output

    def wrong(self: RecordReader, req: Req) -> Any:
        found = output(self, req)
        if req.source.stream and req.finished is None:
            req.num_sent -= 1
        return found

    return _replaced((RecordReader, "output", wrong))


@_enter
def scores_prompt_tokens_twice() -> Context:
    """Score the last prompt token of a chunk again, with the next chunk."""
    score = StepRunner._score_prompts

    def wrong(self: StepRunner, extends: Any, hidden_TD: torch.Tensor) -> Any:
        for item in extends:
            record = item.req.prompt_record
            if record is not None and len(record.values) > 2:
                record.values.pop()
        return score(self, extends, hidden_TD)

    return _replaced((StepRunner, "_score_prompts", wrong))


# --- sampling ------------------------------------------------------------------------------------------------------


@_enter
def penalises_by_the_tokens_of_another_row() -> Context:
    place_rows = SamplingBatchInfo._place_rows

    def wrong(self: SamplingBatchInfo) -> None:
        place_rows(self)
        self._histories = [(place, self._histories[0][1]) for place, _ in self._histories]

    return _replaced((SamplingBatchInfo, "_place_rows", wrong))


@_enter
def samples_with_the_bias_of_another_row() -> Context:
    place_rows = SamplingBatchInfo._place_rows

    def wrong(self: SamplingBatchInfo) -> None:
        place_rows(self)
        assert self._table is not None
        rows = [i for i, row in self.rows_with_lists if row.params.logit_bias]
        for end in ("bias_begin", "bias_end") if rows else ():
            self._table[end][rows] = self._table[end][rows[0]]

    return _replaced((SamplingBatchInfo, "_place_rows", wrong))


@_enter
def draws_by_the_place_in_the_batch() -> Context:
    """Draw each row of a step by the seed of the first."""
    table_of = batch_info._table_of

    def wrong(settings: Any) -> Any:
        table = table_of(settings)
        if len(table):
            table["seed"] = table["seed"][0]
        return table

    return _replaced((batch_info, "_table_of", wrong))


@_enter
def counts_from_the_retraction() -> Context:
    """Restart the count of places, by which tokens are drawn, when a request comes back from a retraction."""
    sample_first = StepRunner._sample_first

    def wrong(self: StepRunner, *arguments: Any) -> torch.Tensor:
        with mock.patch.object(self, "_sampler", _FromTheStart(self._sampler)):
            return sample_first(self, *arguments)

    return _replaced((StepRunner, "_sample_first", wrong))


class _FromTheStart:
    """A sampler for which every token is the first of its request."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(self, logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens:
        return self._sampler.sample(logits_NV, info, torch.zeros_like(positions_N))


@_enter
def misses_stop_strings() -> Context:
    return _replaced((StopChecker, "_may_end_stop", lambda self, token_id, _: token_id % 2 == 0))


@_enter
def follows_routes_from_the_first_token() -> Context:
    """Follow routes as if no prefix had been found."""
    spans = step_module._spans
    return _replaced((step_module, "_spans", lambda plan: ((req, 0, count) for req, _, count in spans(plan))))


# --- the loop ------------------------------------------------------------------------------------------------------


@_enter
def forgets_who_left() -> Context:
    return _replaced((build, "DecodeBatch", ForgetsWhoLeft))


@_enter
def forgets_to_advance() -> Context:
    return _replaced((build, "DecodeBatch", ForgetsToAdvance))


@_enter
def aborts_by_the_beginning_of_a_name() -> Context:
    abort = Scheduler.abort

    def wrong(self: Scheduler, rids: list[str] | None, *arguments: Any, **named: Any) -> int:
        if rids is not None:
            rids = [rid for rid in self._by_rid if rid.startswith(tuple(rids))]
        return abort(self, rids, *arguments, **named)

    return _replaced((Scheduler, "abort", wrong))


@_enter
def runs_a_step_in_a_pause() -> Context:
    pause = ServingState.pause

    def wrong(self: ServingState) -> None:
        pause(self)
        self._paused = False

    return _replaced((ServingState, "pause", wrong))


@_enter
def forgets_a_retracted_request() -> Context:
    """Forget one of several retracted requests that come back at once."""
    retract = Scheduler.retract

    def wrong(self: Scheduler, reqs: Any) -> None:
        retract(self, reqs)
        if len(self.queues.waiting) > 2:
            self.queues.waiting.popleft()

    return _replaced((Scheduler, "retract", wrong))


@_enter
def lets_kv_grow_one_commit_too_old() -> Context:
    is_too_old = kv_age.KVAgeLimit._is_too_old
    return _replaced((kv_age.KVAgeLimit, "_is_too_old", lambda self, req, epoch: is_too_old(self, req, epoch - 1)))


@_enter
def continues_what_began_too_early() -> Context:
    """Continue requests that are one commit too old for `abort_below_weight_version`."""
    epoch_of, abort = ModelState.epoch_of, kv_age.abort_below

    def wrong(scheduler: Scheduler, weight_version: str | None) -> int:
        with _replaced((ModelState, "epoch_of", lambda self, version: (epoch_of(self, version) or 0) - 1)):
            return abort(scheduler, weight_version)

    return _replaced((weight_control, "abort_below", wrong))


# --- KV events -----------------------------------------------------------------------------------------------------


@_enter
def never_says_what_was_removed() -> Context:
    return _replaced((KVEvents, "removed", lambda *_: None))


@_enter
def loses_an_event() -> Context:
    """Lose one of the events of a prompt which is shared early."""
    stored = KVEvents.stored

    def wrong(self: KVEvents, node: Any, *arguments: Any) -> None:
        stored(self, node, *arguments)
        if len(node) == 1:
            self._events.pop()

    return _replaced((KVEvents, "stored", wrong))
