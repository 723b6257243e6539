"""`GenerateHandle`: the samples of one request in flight, and the two ways to wait for them: at once, or as a stream.

`SingleHandle`: a request of one sample that nothing waits for; it calls when it has ended.

The manager appends to the records and calls `notify`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rollout.core.errors import BadRequest, Conflict, LockstepError
from rollout.core.messages.req_output import FinishReason
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager.binary_response import encode_binary
from rollout.tokenizer_manager.response import (
    HEAVY,
    HEAVY_JSON,
    OutputEntries,
    ResponseForm,
    build_response,
    encode_json,
    weight,
)
from rollout.tokenizer_manager.sample import SampleRecord
from rollout.tokenizer_manager.sample_text import SampleText
from rollout.tokenizer_manager.tail import Place

Result = TypeVar("Result")


class RefusedByScheduler(LockstepError):
    """The scheduler refused a request; the status is the scheduler's."""

    def __init__(self, reason: FinishReason) -> None:
        super().__init__(reason.message or "the scheduler refused the request")
        assert reason.status_code is not None
        self.status_code = reason.status_code


@dataclass(slots=True)
class Sample:
    record: SampleRecord
    text: SampleText | None
    entries: OutputEntries = field(default_factory=OutputEntries)

    @classmethod
    def of(cls, record: SampleRecord, tokenizer: Tokenizer | None, form: ResponseForm) -> Sample:
        return cls(record, None if tokenizer is None else SampleText(record, tokenizer, form.kept_ids))

    @property
    def has_ended(self) -> bool:
        return self.record.finished is not None

    def response(self, form: ResponseForm) -> dict[str, Any]:
        """Return the response so far."""
        text = None if self.text is None else self.text.update()
        return build_response(self.record, text, form, self.entries)

    def encoded(self, form: ResponseForm) -> bytes:
        """Return the final response, msgpack where the request has a binary form, else JSON; give up the record."""
        content = self.response(form)
        data = encode_binary(content) if form.is_binary else encode_json(content)
        self.record.give_up()
        self.entries = OutputEntries()
        return data

    def require_run(self) -> None:
        """Raise `RefusedByScheduler` if the scheduler refused it."""
        assert self.record.finished is not None
        reason = self.record.finished.reason
        if reason.type == "abort" and reason.status_code is not None and reason.status_code >= 400:
            raise RefusedByScheduler(reason)


class SampleWaiter(Protocol):
    """The part of a handle that the manager calls."""

    def notify(self, index: int) -> None:
        """Note that record `index` has grown."""

    def fail(self, error: LockstepError) -> None:
        """End the request with `error`."""


class SingleHandle:
    """A request of one sample; `on_end` is called once, when the sample has ended or failed.

    `on_end` None: the answer is not wanted any more.
    """

    def __init__(
        self,
        record: SampleRecord,
        tokenizer: Tokenizer | None,
        form: ResponseForm,
        on_end: Callable[[], None],
        abort: Callable[[list[str]], None],
    ) -> None:
        self.on_end: Callable[[], None] | None = on_end
        self._record = record
        self._tokenizer = tokenizer
        self._form = form
        self._abort = abort
        self._error: LockstepError | None = None

    def notify(self, index: int) -> None:
        if self._record.finished is not None and self.on_end is not None:
            self.on_end()

    def fail(self, error: LockstepError) -> None:
        self._error = error
        if self.on_end is not None:
            self.on_end()

    def abort(self) -> None:
        """Ask the scheduler to stop it if it has not ended.  Does not wait."""
        if self._record.finished is None:
            self._abort([self._record.rid])

    @property
    def is_heavy(self) -> bool:
        """True if `encoded` should not run on the event loop."""
        return weight(self._record) > HEAVY

    def encoded(self) -> bytes:
        """Return the final response, as `GenerateHandle.encoded` does; call it once.

        Raises what `fail` was given, or `RefusedByScheduler`.
        """
        if self._error is not None:
            raise self._error
        # Made now: thousands wait, and each object is visited whenever Python looks for cycles.
        sample = Sample.of(self._record, self._tokenizer, self._form)
        sample.require_run()
        return sample.encoded(self._form)


class GenerateHandle:
    """One request's samples in reply order: prompt by prompt, and sample by sample within a prompt."""

    def __init__(
        self,
        records: list[SampleRecord],
        *,
        replies_with_list: bool,
        tokenizer: Tokenizer | None,
        form: ResponseForm,
        abort: Callable[[list[str]], None],
        held: object = None,
    ) -> None:
        """Take in the samples.  `held`: what must live as long as the handle."""
        self.replies_with_list = replies_with_list
        self.form = form
        self._samples = [Sample.of(record, tokenizer, form) for record in records]
        self._abort = abort
        self._tokenizer = tokenizer
        self._news = asyncio.Event()
        self._reader: object | None = None
        self._fresh: dict[int, None] = {}
        self._error: LockstepError | None = None
        self._held = held

    @property
    def records(self) -> list[SampleRecord]:
        return [sample.record for sample in self._samples]

    def notify(self, index: int) -> None:
        """Note that record `index` has grown."""
        self._fresh[index] = None
        self._news.set()

    def fail(self, error: LockstepError) -> None:
        """End `result` and `stream` with `error`, and ask the scheduler to stop what is not finished."""
        self.abort()
        self._error = error
        self._news.set()

    def abort(self) -> None:
        """Ask the scheduler to stop what is not finished.  Does not wait.

        After `fail` nothing is left to stop, and another request may have the names by now.
        """
        if self._error is None:
            self._abort([record.rid for record in self.records if record.finished is None])

    async def result(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the final response, or the list of them.

        Raises what `fail` was given, or `RefusedByScheduler`.  Cancelling aborts the request.
        """
        responses = await self.results()
        return responses if self.replies_with_list else responses[0]

    async def results(self) -> list[dict[str, Any]]:
        """Return the same as `result`, always as a list."""
        return await self._of_each(self._build)

    async def encoded(self) -> list[bytes]:
        """Return the final responses in reply order; make each, and give up its record, before the next.

        They are msgpack where the request has a binary form, else JSON.
        """
        return await self._of_each(lambda sample: sample.encoded(self.form))

    async def stream(self) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """Yield (sample index, response so far) whenever a sample has grown; end after every sample's last.

        Text, ids and log-probabilities are cumulative.  Raises what `fail` was given.  Leaving early aborts the
        request.
        """
        try:
            async with contextlib.aclosing(self._grown()) as grown:
                async for index in grown:
                    yield index, await self._respond(index)
        except BaseException:
            self.abort()
            raise

    async def stream_from(self, first: Sequence[int]) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """Yield (sample index, response so far) as `stream` does, for a reader that has the tokens before `first`.

        A sample that has no more tokens, and has not ended, is not yielded before it grows.  Leaving early aborts
        nothing.  Raises `Conflict` once another reader begins.
        """
        own = [Sample.of(sample.record, self._tokenizer, self.form) for sample in self._samples]
        async with contextlib.aclosing(self._grown(first)) as grown:
            async for index in grown:
                yield index, await _run(functools.partial(own[index].response, self.form), self._is_heavy(index))

    async def tails(self, first: Sequence[int]) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """Yield as `stream_from`, but the new part alone: the first one of sample i begins at token `first[i]`."""
        pairs = zip(self._samples, first, strict=True)
        places = [Place(sample.record, self._tokenizer, self.form, count) for sample, count in pairs]
        async with contextlib.aclosing(self._grown(first)) as grown:
            async for index in grown:
                yield index, await _run(places[index].response, self._is_heavy(index))

    def require_tokens(self, first: Sequence[int]) -> None:
        """Raise `BadRequest` unless each sample has its number of tokens."""
        if len(first) != len(self._samples):
            raise BadRequest(f"from_token has {len(first)} entries for {len(self._samples)} samples")
        for index, (sample, count) in enumerate(zip(self._samples, first, strict=True)):
            if not 0 <= count <= len(sample.record.output_ids):
                raise BadRequest(
                    f"from_token is {count}, but sample {index} has {len(sample.record.output_ids)} tokens so far"
                )

    async def _grown(self, first: Sequence[int] | None = None) -> AsyncGenerator[int, None]:
        """Yield the index of a sample whenever it has grown beyond its number in `first`, and when it has ended.

        Ends after every sample's end.  Raises what `fail` was given, or `Conflict` once another reader begins.
        """
        reader = self._reader = object()
        if first is not None:
            pairs = enumerate(zip(self._samples, first, strict=True))
            fresh = [i for i, (each, count) in pairs if each.has_ended or len(each.record.output_ids) > count]
            self._fresh = dict.fromkeys(fresh)
            self._news.set()  # an earlier reader waits for it, too
        done: set[int] = set()
        while len(done) < len(self._samples):
            for index in await self._next_news(reader):
                # A sample may end, and be announced again, while an earlier one is being sent.
                if index in done:
                    continue
                if self._samples[index].has_ended:
                    done.add(index)
                yield index

    async def encode(self, make: Callable[[], Any], index: int | None = None) -> bytes:
        """Return `make()` as JSON, off the event loop if it holds much: all of sample `index`, or of all samples.

        `make` reads responses, not records.
        """
        samples = self._samples if index is None else [self._samples[index]]
        is_over = all(sample.record.finished is not None for sample in samples)
        total = sum(weight(sample.record) for sample in samples)
        return await _run(lambda: _encode(make()), total > (HEAVY if is_over else HEAVY_JSON))

    async def _of_each(self, make: Callable[[Sample], Result]) -> list[Result]:
        """Return the results of `make` for all samples, once these have ended."""
        done: set[int] = set()
        try:
            while len(done) < len(self._samples):
                for index in await self._next_news():
                    if self._samples[index].record.finished is not None:
                        self._samples[index].require_run()
                        done.add(index)
            is_heavy = sum(weight(sample.record) for sample in self._samples) > HEAVY
            return await _run(lambda: [make(sample) for sample in self._samples], is_heavy)
        except BaseException:
            self.abort()
            raise

    async def _next_news(self, reader: object | None = None) -> list[int]:
        """Wait without a deadline: every request ends, or `fail` is called when the scheduler has exited.

        Raises `Conflict` if another reader than `reader` has begun.
        """
        self._require_reader(reader)
        await self._news.wait()
        self._require_reader(reader)
        self._news.clear()
        if self._error is not None:
            raise self._error
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh

    def _require_reader(self, reader: object | None) -> None:
        if reader is not self._reader:
            raise Conflict("another connection reads this stream by now; a stream has one reader")

    async def _respond(self, index: int) -> dict[str, Any]:
        return await _run(lambda: self._build(self._samples[index]), self._is_heavy(index))

    def _is_heavy(self, index: int) -> bool:
        """Return whether a response is to be made in another thread, but never while the record can still grow."""
        record = self._samples[index].record
        return record.finished is not None and weight(record) > HEAVY

    def _build(self, sample: Sample) -> dict[str, Any]:
        return sample.response(self.form)


async def _run(work: Callable[[], Result], is_heavy: bool) -> Result:
    return await asyncio.to_thread(work) if is_heavy else work()


def _encode(content: Any) -> bytes:
    """Encode part by part: the encoder holds the GIL, so that no other thread runs during a part."""
    if isinstance(content, list):
        return b"[" + b",".join(map(encode_json, content)) + b"]"
    return encode_json(content)
