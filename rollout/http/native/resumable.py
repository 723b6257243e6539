"""Streams that outlive their connections: kept for a while, so that a client can ask for the rest.

    POST /generate, resumable ---> read ---> connection lost ---> kept ---> POST /generate/resume ---> read ...
                                                               '---> over a limit, or too old: aborted and forgotten

The rest of a stream of /generate is made of its tokens.  Streams of other doors have logs of events.  A server cannot
tell whether a client has read the end of a stream.  So a stream that was sent to its end is kept, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

from rollout.core.errors import BadRequest, NotFound
from rollout.http.io import DATA_EVENTS, SseForm, SseResponse
from rollout.http.native.event_log import EventLog
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.sample import SampleRecord

KEPT_S = 60.0
"""Seconds that a stream without a reader is kept."""
MAX_KEPT_SAMPLES = 4096
"""Samples of all streams without a reader."""
MAX_KEPT_BYTES = 256 << 20
"""Bytes of the records of these samples."""
SWEEP_S = 1.0
"""Seconds between two looks at the streams that are kept: they grow, and get old."""
SAMPLE_BYTES = 4096
TOKEN_BYTES = 64
"""Bytes of a token, and of each number that is recorded with it as an object."""


@dataclass(eq=False)
class ResumableStream:
    """A request whose stream may be read by one connection after another.

    `reader`: the number of its last connection, which took it over from the ones before.  `is_read`: that one has not
    ended.  `is_sent`: to its end, once.  `kept_since`: when the last reader left, in seconds of the monotonic clock;
    `num_bytes`: of its records and its log then, or later.  `log`: its events; None for a stream of /generate.
    """

    rid: str
    handle: GenerateHandle
    is_incremental: bool = False
    log: EventLog | None = None
    reader: int = 1
    is_read: bool = True
    is_sent: bool = False
    kept_since: float = 0.0
    num_bytes: int = 0

    @property
    def num_samples(self) -> int:
        return len(self.handle.records)

    @property
    def is_too_large(self) -> bool:
        """True if it is over a limit alone, so that no other stream need go for it."""
        return self.num_samples > MAX_KEPT_SAMPLES or self.num_bytes > MAX_KEPT_BYTES

    def measure(self) -> None:
        """Set `num_bytes` to what records and log take, roughly.  Samples share the parts of a request."""
        records = self.handle.records
        shared = {id(part): size for record in records for part, size in _request_parts(record)}
        self.num_bytes = sum(map(_record_bytes, records)) + sum(shared.values())
        self.num_bytes += 0 if self.log is None else self.log.num_bytes


class ResumableStreams:
    """Holds the resumable streams by the `rid` of their request.  Use from one event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, ResumableStream] = {}
        self._is_sweep_due = False

    def begin(self, rid: str, handle: GenerateHandle, *, is_incremental: bool) -> ResumableStream:
        """Take in a request that was just sent, with its first reader.  An ended one of the same name is forgotten."""
        stream = self._streams[rid] = ResumableStream(rid, handle, is_incremental)
        return stream

    def begin_events(
        self,
        rid: str,
        handle: GenerateHandle,
        events: AsyncGenerator[bytes, None],
        form: SseForm = DATA_EVENTS,
        *,
        shows_numbers: bool = True,
    ) -> SseResponse:
        """Take in a request as `begin` does, whose stream has these events; return the answer to its first reader."""
        log = EventLog(events, form, shows_numbers=shows_numbers)
        stream = self._streams[rid] = ResumableStream(rid, handle, log=log)
        return self._from_event(stream, log, 0)

    def resume_events(self, rid: str, number: int) -> SseResponse:
        """Give a stream that has a log a new reader, and return the answer to it, from event `number` on.

        Raises `NotFound`, and `BadRequest` for an event that is not there or for a stream of /generate.
        """
        stream = self._known(rid)
        if stream.log is None:
            raise BadRequest("a stream of /generate goes on from a token: ask with from_token")
        stream.log.require(number)
        stream.reader, stream.is_read = stream.reader + 1, True
        return self._from_event(stream, stream.log, number)

    def _from_event(self, stream: ResumableStream, log: EventLog, number: int) -> SseResponse:
        async def events() -> AsyncGenerator[bytes, None]:
            async with contextlib.aclosing(log.read(number)) as inner:
                async for event in inner:
                    yield event
            stream.is_sent = True

        return SseResponse(events(), functools.partial(self.leave, stream, stream.reader), log.form)

    def resume(self, rid: str, from_token: int | Sequence[int]) -> tuple[ResumableStream, list[int]]:
        """Give a stream a new reader, and return it with the first token of each sample.

        Raises `NotFound` for a name that is not known, `BadRequest` for tokens that do not exist yet.
        """
        stream = self._known(rid)
        if stream.log is not None:
            raise BadRequest("this stream goes on from an event: ask with from_event")
        first = [from_token] * stream.num_samples if isinstance(from_token, int) else list(from_token)
        stream.handle.require_tokens(first)
        stream.reader, stream.is_read = stream.reader + 1, True
        return stream, first

    def forget_ended(self, rid: str) -> None:
        """Forget the stream of a request that has ended.  Its reader, if it has one, goes on."""
        stream = self._streams.get(rid)
        if stream is not None and all(record.finished is not None for record in stream.handle.records):
            self._forget(stream)

    def _known(self, rid: str) -> ResumableStream:
        stream = self._streams.get(rid)
        if stream is None:
            raise NotFound(
                f"no stream of {rid[:200]!r} is kept: it was not resumable, or its client was away for over "
                f"{KEPT_S:.0f} s. Send the request again"
            )
        return stream

    def leave(self, stream: ResumableStream, reader: int) -> None:
        """Note that a reader's connection has ended.  If it was the last reader, the stream is kept for a while.

        A connection that was taken over may hang for long after, as its machine is gone.
        """
        if reader == stream.reader:
            stream.is_read = False
            stream.kept_since = time.monotonic()
            if stream.log is not None:
                stream.log.run_on()
            stream.measure()
            self._forget_excess()
            self._sweep_later()

    @property
    def kept(self) -> list[ResumableStream]:
        """The streams without a reader."""
        return [stream for stream in self._streams.values() if not stream.is_read]

    @property
    def kept_bytes(self) -> int:
        """The bytes of these, as they were measured last."""
        return sum(stream.num_bytes for stream in self.kept)

    def _forget_excess(self) -> None:
        """Forget streams while they are over a limit.

        The ones that are over it alone go first, then the ones that were sent to their end, then the oldest.
        """
        kept = self.kept
        samples, size = sum(each.num_samples for each in kept), sum(each.num_bytes for each in kept)
        if samples <= MAX_KEPT_SAMPLES and size <= MAX_KEPT_BYTES:
            return
        for stream in sorted(kept, key=lambda each: (not each.is_too_large, not each.is_sent, each.kept_since)):
            self._forget(stream)
            samples, size = samples - stream.num_samples, size - stream.num_bytes
            if samples <= MAX_KEPT_SAMPLES and size <= MAX_KEPT_BYTES:
                return

    def _sweep_later(self) -> None:
        if not self._is_sweep_due:
            self._is_sweep_due = True
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._is_sweep_due = False
        now = time.monotonic()
        for stream in self.kept:
            if now - stream.kept_since > KEPT_S:
                self._forget(stream)
            else:
                stream.measure()
        self._forget_excess()
        if self.kept:
            self._sweep_later()

    def _forget(self, stream: ResumableStream) -> None:
        """Abort what has not ended."""
        del self._streams[stream.rid]
        stream.handle.abort()


def _record_bytes(record: SampleRecord) -> int:
    """Return the bytes of a record's parts that grow with its tokens."""
    alternatives, mask, finished = record.output_alternatives, record.output_mask, record.finished
    objects = len(record.output_ids) + len(record.output_logprobs) + 2 * len(mask.counts)
    total = SAMPLE_BYTES + TOKEN_BYTES * objects
    total += len(alternatives.top_logprobs) + len(alternatives.top_ids) + len(alternatives.chosen_logprobs)
    total += len(mask.token_ids) + len(mask.kept_logprobs)
    if record.rows is not None:
        total += len(record.rows.route_data)
    if finished is not None:
        total += len(finished.routed_experts.data) if finished.routed_experts is not None else 0
        total += len(finished.hidden_states.data) if finished.hidden_states is not None else 0
        prompt = finished.prompt_logprobs
        if prompt is not None:
            total += TOKEN_BYTES * len(prompt.values)
            if (rows := prompt.alternatives) is not None:
                total += len(rows.top_logprobs) + len(rows.top_ids) + len(rows.chosen_logprobs)
    return total


def _request_parts(record: SampleRecord) -> Iterator[tuple[object, int]]:
    """Yield the parts of a record's request that may be large, each with its bytes."""
    source, params = record.source, record.source.sampling_params
    lists = (source.input_ids, source.token_ids_logprob, params.stop_token_ids, params.allowed_token_ids)
    for entries in (*lists, params.logit_bias, *params.bad_word_ids):
        yield entries, TOKEN_BYTES * len(entries or ())
    for texts in (params.stop, params.bad_words):
        yield texts, sum(TOKEN_BYTES + 4 * len(text) for text in texts)
    if params.grammar is not None:
        yield params.grammar, 4 * len(params.grammar.text)
