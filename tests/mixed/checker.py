"""Compares each finished request with the same request alone: the bits must be the same.

A request under one content must get the answer of an idle engine of that content.  One that lived through a commit has
whole spans and rows.  A token whose KV was all of one content must have the log-probability and routes that this
content gives to the same tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rollout.core.messages.req_output import FinishedRecord, VersionSpan
from tests.alternatives import chosen_rows, top_rows
from tests.mixed.engine import Engine
from tests.mixed.schedule import Ask
from tests.mixed.violation import Violation
from tests.mixed.watch import OVER_MASK_LIMIT, Watch
from tests.mixed.zoo import Model
from tests.scheduler_harness import Result

_BEGAN = "Aborted: it began under"


@dataclass
class Tally:
    """The numbers of checks, and of events in the schedules: a checker that sees nothing finds nothing."""

    schedules: int = 0
    requests: int = 0
    alone: int = 0  # compared bit for bit with running alone
    mixed: int = 0  # lived through a commit
    aborted: int = 0
    over_mask_limit: int = 0
    refused: int = 0
    tokens: int = 0
    scored_again: int = 0  # tokens of mixed requests
    masks: int = 0
    route_rows: int = 0
    replayed: int = 0
    prompt_scores: int = 0
    retractions: int = 0
    prefix_hits: int = 0
    commits: int = 0
    event_batches: int = 0
    held_weights: int = 0  # schedules with weights in fewer bits
    fp8_kv: int = 0  # schedules

    def add(self, other: Tally) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, item.name)} {item.name.replace('_', ' ')}" for item in fields(self))


class Checker:
    """Raises `Violation` for the first thing that is wrong with a finished request."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.engine: Engine | None = None
        self.tally = Tally()

    def check(self, result: Result, watch: Watch) -> None:
        record, tally = result.finished, self.tally
        assert record is not None and self.engine is not None
        try:
            tally.requests += 1
            if self._is_refused(result, watch, record):
                tally.refused += 1
                return
            _check_messages(result, watch)
            _check_versions(result, watch, record)
            _check_lengths(result, watch.ask)
            _check_wanted(record, watch.ask)
            if record.cached_tokens > self.engine.found_before(result):
                raise Violation(f"{record.cached_tokens} tokens were found that nobody computed under this key")
            contents = watch.contents(self.engine.of_epoch)
            if len(contents) > 1:
                tally.mixed += 1
                self._check_mixed(result, watch)
            else:
                tally.alone += 1
                content = next(iter(contents), self.engine.of_epoch[-1])
                self._check_alone(result, watch, content)
        except Violation as violation:
            label = "" if record.reason.message is None else f": {record.reason.message}"
            raise Violation(f"{result.rid} ({record.reason.type}{label}): {violation}") from None
        self._count(result, watch, record)

    def _is_refused(self, result: Result, watch: Watch, record: FinishedRecord) -> bool:
        """Return whether the request was refused, as memory was released when it came."""
        if record.reason.status_code != 503:
            if watch.must_be_refused and not watch.may_end:
                raise Violation("it ran, and memory was released when it came")
            return False
        if not watch.must_be_refused or result.token_ids:
            raise Violation("it was refused without a reason")
        return True

    # --- one content ----------------------------------------------------------------------------------------------

    def _check_alone(self, result: Result, watch: Watch, content: int) -> None:
        record = result.finished
        assert record is not None and self.engine is not None
        is_cut = record.reason.type == "abort" and record.reason.status_code not in OVER_MASK_LIMIT
        want = self._model.alone(watch.ask, watch.seed, content, len(result.token_ids) if is_cut else None)
        assert want.finished is not None
        end, status = _end_of_masks(want, watch.ask, self.engine.settings.mask_limit)
        if record.reason.status_code in OVER_MASK_LIMIT:
            _same("where masks end it", (len(result.token_ids), record.reason.status_code), (end, status))
        elif record.reason.type == "abort":
            self._require_abort(watch, record)
        elif end is not None:
            raise Violation(f"the mask of token {end} is over a limit, and it went on")
        else:
            _same("tokens", result.token_ids, want.token_ids)
            _same("finish reason", record.reason, want.finished.reason)
        count, ask = len(result.token_ids), watch.ask
        _same("tokens", result.token_ids, want.token_ids[:count])
        _same_bits("log-probabilities", result.logprobs, want.logprobs[:count])
        _same("best tokens", result.top, want.top[:count])
        _same("chosen tokens", result.chosen, want.chosen[:count])
        _check_masks(result, want, count)
        if ask.routes:
            self._check_routes(result, watch, want)
        _check_prompt(result, want)

    def _require_abort(self, watch: Watch, record: FinishedRecord) -> None:
        """Require that an abort or `abort_below_weight_version` explains the early end of the request."""
        assert self.engine is not None
        message = record.reason.message or ""
        if watch.may_end or (message.startswith(_BEGAN) and self.engine.began_too_early(watch)):
            return
        raise Violation("nobody aborted it")

    def _check_routes(self, result: Result, watch: Watch, want: Result) -> None:
        got, whole = result.finished.routed_experts, want.finished.routed_experts  # type: ignore[union-attr]
        assert got is not None and whole is not None
        _check_rows(result, watch)
        rows_TLK, first = result.routes, got.start - whole.start
        wrong = np.flatnonzero((rows_TLK != want.routes[first : first + len(rows_TLK)]).any(axis=(1, 2)))
        if len(rows_TLK) and wrong.size:
            raise Violation(f"rows {(wrong + got.start).tolist()} of the routes are other ones")

    # --- several contents -----------------------------------------------------------------------------------------

    def _check_mixed(self, result: Result, watch: Watch) -> None:
        record, ask = result.finished, watch.ask
        assert record is not None
        if record.reason.type == "abort" and record.reason.status_code not in OVER_MASK_LIMIT:
            self._require_abort(watch, record)
        if ask.routes:
            _check_rows(result, watch)
        self._check_beginning(result, watch)
        for content in sorted(watch.contents(self._of_epoch)):
            self._check_pure(result, watch, content)

    @property
    def _of_epoch(self) -> Sequence[int]:
        assert self.engine is not None
        return self.engine.of_epoch

    def _check_beginning(self, result: Result, watch: Watch) -> None:
        """Require that tokens before the request's first commit or retraction equal the tokens that it gets alone."""
        life, first = watch.lives[0], len(watch.ask.prompt) - 1
        if not life:
            return
        content = self._of_epoch[life[0]]
        pure = _pure_length(life, self._of_epoch, content)
        count = 0
        for made in watch.tokens:
            if made.life or self._of_epoch[made.by.epoch] != content or pure <= first + count:
                break
            count += 1
        want = self._model.alone(watch.ask, watch.seed, content, count)
        _same("first tokens", result.token_ids[:count], want.token_ids[:count])
        _same_bits("first log-probabilities", result.logprobs[:count], want.logprobs[:count])
        _same("first masks", result.mask.counts[:count], want.mask.counts[:count])

    def _check_pure(self, result: Result, watch: Watch, content: int) -> None:
        """Compare the values computed only from KV of `content` with the values of the same tokens in one piece."""
        record, ask, first = result.finished, watch.ask, len(watch.ask.prompt) - 1
        assert record is not None
        pure = [_pure_length(life, self._of_epoch, content) for life in watch.lives]
        rows = [position for position, owner in enumerate(_owners(watch)) if position < pure[owner]]
        tokens = [
            index
            for index, made in enumerate(watch.tokens)
            if self._of_epoch[made.by.epoch] == content and pure[made.life] > first + index
        ]
        if not rows and not tokens:
            return
        want = self._model.scored(ask, result.token_ids, content)
        assert want.finished is not None and want.finished.prompt_logprobs is not None
        values = want.finished.prompt_logprobs.values
        if result.logprobs and not ask.edits_logits:
            ours = [result.logprobs[index] for index in tokens]
            _same_bits("log-probabilities", ours, [values[first + 1 + index] for index in tokens])
            self.tally.scored_again += len(tokens)
        scores = record.prompt_logprobs
        if scores is not None:
            places = [row + 1 for row in rows if ask.scored <= row < ask.scored + len(scores.values) - 1]
            ours = [scores.values[place - ask.scored] for place in places]  # type: ignore[misc]
            _same_bits("prompt log-probabilities", ours, [values[place] for place in places])
            self.tally.scored_again += len(places)
        payload = record.routed_experts
        if payload is not None:
            rows = [row for row in rows if payload.start <= row < payload.start + payload.num_rows]
            ours_TLK = result.routes[[row - payload.start for row in rows]]
            if not np.array_equal(ours_TLK, want.routes[rows]):
                raise Violation(f"routes among the rows {rows} are not those of content {content}")

    def _count(self, result: Result, watch: Watch, record: FinishedRecord) -> None:
        tally = self.tally
        tally.aborted += record.reason.type == "abort"
        tally.over_mask_limit += record.reason.status_code in OVER_MASK_LIMIT
        tally.tokens += len(result.token_ids)
        tally.masks += len(result.mask.counts)
        tally.route_rows += record.routed_experts.num_rows if record.routed_experts else 0
        tally.replayed += watch.ask.replay is not None
        tally.prompt_scores += record.prompt_logprobs is not None
        tally.retractions += record.num_retractions
        tally.prefix_hits += record.cached_tokens > 0


# --- one thing each ------------------------------------------------------------------------------------------------


def _same(what: str, got: Any, want: Any) -> None:
    if got != want:
        raise Violation(f"{what}: {got}, alone {want}")


def _same_bits(what: str, got: Sequence[float | None], want: Sequence[float | None]) -> None:
    ours, theirs = np.array(got, dtype=np.float64), np.array(want, dtype=np.float64)
    if ours.tobytes() != theirs.tobytes():
        differ = np.flatnonzero(ours != theirs) if ours.shape == theirs.shape else [len(ours), len(theirs)]
        raise Violation(f"{what} differ at {[int(place) for place in differ]}: {got}, alone {want}")


def _check_messages(result: Result, watch: Watch) -> None:
    """Require one message per token of a stream, and one message for any other request."""
    if not watch.ask.stream and result.num_messages != 1:
        raise Violation(f"{result.num_messages} messages without streaming")
    if watch.ask.stream and any(new > 1 for new, _, _ in watch.streamed):
        raise Violation("several tokens in a message of a stream")
    for new, so_far, label in watch.streamed:
        if new and label != watch.tokens[so_far - 1].by.label:
            raise Violation(f"token {so_far - 1} came as of {label}; in force was {watch.tokens[so_far - 1].by.label}")


def _check_versions(result: Result, watch: Watch, record: FinishedRecord) -> None:
    """Check the stated versions of tokens, of the prompt's KV and scores, and of the oldest KV."""
    claimed = _spread(record.weight_versions)
    seen = [(made.by.label, made.by.epoch) for made in watch.tokens]
    if claimed != seen:
        raise Violation(f"tokens are labelled {claimed}; in force were {seen}")
    *earlier, last = watch.lives
    given_up = next((life for life in reversed(earlier) if life), [])
    written = (last + given_up[len(last) :])[: len(result.prompt_ids)]
    is_known = record.reason.type != "abort" or record.reason.status_code in OVER_MASK_LIMIT
    prefill = [epoch for _, epoch in _spread(record.prefill_weight_versions)]
    if is_known and prefill != written:
        raise Violation(f"the prompt's KV is said to be of the epochs {prefill}, it is of {written}")
    scores, owners = record.prompt_logprobs, _owners(watch)
    if scores is not None and is_known:
        seen_by = [watch.lives[owners[row]][row] for row in range(scores.start, scores.start + len(scores.values) - 1)]
        if [epoch for _, epoch in _spread(scores.versions, 1)] != seen_by:
            raise Violation(f"scores of the prompt are said to be of {scores.versions}; computed in {seen_by}")
    held = [epoch for life in watch.lives for epoch in life]
    if is_known and record.kv_weight_epoch_oldest != min(held, default=None):
        raise Violation(f"the oldest KV is said to be of epoch {record.kv_weight_epoch_oldest}, it is of {min(held)}")


def _spread(spans: Sequence[VersionSpan], first: int = 0) -> list[tuple[str, int]]:
    """Return the label and epoch of each place from `first` on; the spans must have no gap or overlap."""
    found: list[tuple[str, int]] = []
    for span in spans:
        if span.start != first + len(found) or span.end <= span.start:
            raise Violation(f"spans {spans} do not follow one another")
        found += [(span.version, span.weight_epoch)] * (span.end - span.start)
    return found


def _check_lengths(result: Result, ask: Ask) -> None:
    """Require the values that were asked for of each token, and no others."""
    count = len(result.token_ids)
    lengths = {
        "logprobs": (len(result.logprobs), ask.logprobs),
        "top": (len(result.top), ask.logprobs and ask.top),
        "chosen": (len(result.chosen), ask.logprobs and ask.chosen),
        "masks": (len(result.mask.counts), ask.mask is not None),
        "logprobs of masks": (len(result.mask.logprobs), ask.mask is not None),
    }
    for name, (length, wanted) in lengths.items():
        if length != (count if wanted else 0):
            raise Violation(f"{length} {name} for {count} tokens")
    num_ids = sum(result.mask.counts)
    if len(result.mask.token_ids) != 4 * num_ids:
        raise Violation("ids of masks are missing")
    if len(result.mask.kept_logprobs) != (4 * num_ids if ask.mask == "support" else 0):
        raise Violation("log-probabilities of masks are missing")


def _check_wanted(record: FinishedRecord, ask: Ask) -> None:
    """Require routes and prompt scores exactly where they were asked for; an aborted request may have fewer scores."""
    if (record.routed_experts is not None) != ask.routes:
        raise Violation("routes that were not asked for, or none")
    scores, num_wanted = record.prompt_logprobs, len(ask.prompt) - ask.scored
    if (scores is not None) != (ask.logprobs and 0 <= ask.scored < len(ask.prompt)):
        raise Violation("scores of the prompt that were not asked for, or none")
    if scores is None:
        return
    if scores.start != ask.scored or len(scores.values) > num_wanted:
        raise Violation(f"{len(scores.values)} scores of the prompt from {scores.start}")
    if len(scores.values) < num_wanted and record.reason.type != "abort":
        raise Violation(f"{len(scores.values)} scores of the prompt; {num_wanted} were wanted")


def _end_of_masks(want: Result, ask: Ask, limit: int) -> tuple[int | None, int | None]:
    """Return the first token whose mask exceeds the limit of one mask or of all masks so far, and the status."""
    total = 0
    for index, count in enumerate(want.mask.counts):
        total += count
        if count > limit:
            return index, 400
        if ask.mask_ids is not None and total > ask.mask_ids:
            return index, 413
    return None, None


def _check_masks(result: Result, want: Result, count: int) -> None:
    _same("sizes of masks", result.mask.counts, want.mask.counts[:count])
    size = 4 * sum(result.mask.counts)
    _same("ids of masks", bytes(result.mask.token_ids), bytes(want.mask.token_ids[:size]))
    _same_bits("log-probabilities in masks", result.mask.logprobs, want.mask.logprobs[:count])
    kept = bytes(want.mask.kept_logprobs[: len(result.mask.kept_logprobs)])
    _same("log-probabilities of masks", bytes(result.mask.kept_logprobs), kept)


def _check_prompt(result: Result, want: Result) -> None:
    """Check log-probabilities of the prompt; an aborted request may have fewer."""
    got, whole = result.finished.prompt_logprobs, want.finished.prompt_logprobs  # type: ignore[union-attr]
    if got is None or whole is None:
        _same("prompt log-probabilities", got, whole)
        return
    is_aborted = result.finished.reason.type == "abort"  # type: ignore[union-attr]
    count = len(got.values) if is_aborted else len(whole.values)
    _same("prompt log-probabilities from", got.start, whole.start)
    _same_bits("prompt log-probabilities", got.values, whole.values[:count])
    for rows in (top_rows, chosen_rows):
        ours = rows(got.alternatives, len(got.values) - 1)
        theirs = rows(whole.alternatives, len(whole.values) - 1)
        _same("alternatives of the prompt", ours, theirs[: len(ours)])


def _check_rows(result: Result, watch: Watch) -> None:
    """Require a row for each token but the last, with its epoch; an abort may come before the forward."""
    record = result.finished
    assert record is not None and record.routed_experts is not None
    payload = record.routed_experts
    end = payload.start + payload.num_rows
    whole = len(result.prompt_ids) + len(result.token_ids) - 1
    is_early = record.reason.type == "abort" and not result.token_ids
    if end > whole or (end < whole and not is_early):
        raise Violation(f"rows of routes {payload.start}..{end}, not to {whole}")
    claimed = [epoch for _, epoch in _spread(payload.versions)]
    seen = [watch.lives[owner][position] for position, owner in enumerate(_owners(watch))][payload.start : end]
    if len(claimed) != payload.num_rows or (claimed != seen and record.reason.type != "abort"):
        raise Violation(f"rows of routes are of the epochs {claimed}; computed in {seen}")


def _pure_length(life: Sequence[int], of_epoch: Sequence[int], content: int) -> int:
    """Return how many leading positions of `life` are of `content`."""
    return next((p for p, epoch in enumerate(life) if of_epoch[epoch] != content), len(life))


def _owners(watch: Watch) -> list[int]:
    """Return, for each position, the life whose row of routes the record keeps: the first that computed it."""
    owners: list[int] = []
    for number, life in enumerate(watch.lives):
        owners += [number] * (len(life) - len(owners))
    return owners
