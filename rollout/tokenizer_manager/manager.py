"""`TokenizerManager`: the main process's side of the engine.  Owns the requests in flight, by rid, and the phase.

STARTING -> SERVING -> STOPPING        submit and control verbs work in SERVING only;
    \\          \\-> FAILED <-/          in STOPPING what is in flight runs on
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import LockstepError, StartupError, Unavailable, UnsupportedFeature
from rollout.core.messages.adapters import AdaptersChanged
from rollout.core.messages.io_struct import (
    AbortReqInput,
    BatchTokenOutput,
    SchedulerFailed,
    SchedulerOutput,
    SchedulerReady,
    TokenizedGenerateReqInput,
)
from rollout.core.messages.message import AnyReply, ControlReqInput, ControlReqOutput
from rollout.core.messages.req_output import ReqOutput
from rollout.core.messages.scheduler_state import SchedulerState
from rollout.core.messages.unreadable import Unreadable
from rollout.core.messages.update_state import CommitReply
from rollout.core.specs.model_config import ModelConfig
from rollout.text.token_vocabulary import TokenVocabulary
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager.budget import AnswerForm
from rollout.tokenizer_manager.channel import SchedulerLink, in_parts
from rollout.tokenizer_manager.communicator import Communicator
from rollout.tokenizer_manager.handle import GenerateHandle, SingleHandle
from rollout.tokenizer_manager.in_flight import InFlight, InFlightSample, RidRegistry
from rollout.tokenizer_manager.replay import read_replays
from rollout.tokenizer_manager.request import ExpandedRequest, GenerateReqInput, IgnoredFields, expand, sample_rids
from rollout.tokenizer_manager.response import ResponseForm, RouteShape
from rollout.tokenizer_manager.restrictions import Restrictions
from rollout.tokenizer_manager.sample import RequestObserver, SampleRecord
from rollout.tokenizer_manager.validation import ServingLimits, check_messages

logger = logging.getLogger(__name__)

SLICE_S = 0.002


class Phase(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    FAILED = "failed"


class TokenizerManager:
    """Use from one event loop, with `run()` as a task of it."""

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        link: SchedulerLink,
        observers: Iterable[RequestObserver] = (),
    ) -> None:
        self.server_args = server_args
        self.model_config = model_config
        self.phase = Phase.STARTING
        self.weight_version = server_args.weight_version  # the last one that the scheduler reported
        self.started_at = time.time()
        self.start_id = uuid.uuid4().hex
        self.num_messages = 0
        self.scheduler_failed = asyncio.Event()
        self.failure_message: str | None = None  # why the scheduler failed
        self.communicator = Communicator(link.send, server_args.dp_size)
        self._link = link
        self._observers = list(observers)
        self._route_shape = RouteShape.of(model_config)
        self._tokenizer: Tokenizer | None = None
        self._limits: ServingLimits | None = None
        self.restrictions = Restrictions(model_config)
        self._ready: asyncio.Future[SchedulerReady] | None = None
        self._failure: LockstepError | None = None
        self._ranks_ready: list[SchedulerReady] = []
        self._in_flight, self._rids = InFlight(server_args.dp_size), RidRegistry()
        self._ignored_fields = IgnoredFields(is_strict=server_args.strict_requests)

    # --- life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the scheduler's messages until cancelled.

        Once it serves, a message that cannot be read fails the calls that it names, or all in flight if it names none.
        Others on the event loop get their turn after at most `SLICE_S` and a part of a message.
        """
        began = time.monotonic()
        while True:
            for part in in_parts(await self._link.receive()):
                self.handle_message(part)
                if time.monotonic() - began > SLICE_S:
                    await asyncio.sleep(0)
                    began = time.monotonic()

    async def scheduler_ready(self) -> SchedulerReady:
        """Wait for the first message of every data-parallel rank.  The caller ends the wait with the process's life.

        Raises `StartupError` with the scheduler's reason.
        """
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._ready)

    def serve(self, ready: SchedulerReady, tokenizer: Tokenizer | None) -> None:
        """Start admitting requests."""
        self._tokenizer = tokenizer
        if tokenizer is not None:
            tokenizer.context_length = ready.context_length
        self.weight_version = ready.weight_version
        self._limits = ServingLimits.of(self.server_args, self.model_config, ready, tokenizer)
        self.restrictions.serve(tokenizer)
        self.phase = Phase.SERVING

    def stop_admitting(self) -> None:
        """Refuse new requests from now on; what is in flight runs on."""
        if self.phase is not Phase.FAILED:
            self.phase = Phase.STOPPING
        self.restrictions.close()

    def fail(self, reason: str) -> None:
        """Fail requests in flight, and all that follow, with 503 and the reason: the scheduler has exited."""
        self.phase = Phase.FAILED
        self._failure = Unavailable(reason)
        self.restrictions.close()
        for sample in self._in_flight.all():
            sample.handle.fail(Unavailable(reason))
        self._in_flight.clear()
        self._rids.clear()
        self.communicator.fail_all(self._failure)

    def observe(self, observer: RequestObserver) -> None:
        """Notify one more observer from now on."""
        self._observers.append(observer)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def sessions_in_flight(self) -> list[str]:
        """Return the session of each sample in flight that has one."""
        return [name for sample in self._in_flight.all() if (name := sample.record.session_id) is not None]

    def arrivals_in_flight(self) -> list[float]:
        """Return when each sample in flight arrived, in seconds of the monotonic clock."""
        return [sample.record.created_at for sample in self._in_flight.all()]

    @property
    def limits(self) -> ServingLimits:
        """The limits that requests are checked against.  Raises `Unavailable` unless the server admits requests."""
        if self.phase is Phase.FAILED and self._failure is not None:
            raise Unavailable(str(self._failure))
        if self.phase is not Phase.SERVING or self._limits is None:
            raise Unavailable(f"the server is {self.phase.value}")
        return self._limits

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.  Raises `Unavailable` unless serving, `UnsupportedFeature` on a server without a tokenizer."""
        self.limits  # noqa: B018 - raises unless serving
        if self._tokenizer is None:
            raise UnsupportedFeature("this server runs --skip-tokenizer-init: send input_ids instead of text")
        return self._tokenizer

    @property
    def vocabulary(self) -> TokenVocabulary | None:
        """The tokenizer's vocabulary; None on a server without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.vocabulary

    def token_ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """Return the ids of the `tokens` that the model can sample; none on a server without a tokenizer."""
        ids = () if self.vocabulary is None else self.vocabulary.ids_of(tokens)
        return frozenset(index for index in ids if index < self.model_config.vocab_size)

    # --- requests ------------------------------------------------------------------------------------------------

    async def submit(self, request: GenerateReqInput) -> GenerateHandle:
        """Check, tokenise and send a request.

        Raises `BadRequest`, `UnsupportedFeature`, `NotFound` or `TooLarge` before anything was sent, `Unavailable` when
        the server does not serve, or has no room for its hidden states now.
        """
        limits = self.limits
        limits.check_rank(request.routed_dp_rank)
        expanded = expand(
            request,
            routes_by_default=limits.routes_by_default,
            masks_by_default=self.server_args.return_sampling_mask,
        )
        limits.names.complete(expanded, request)
        ignored = self._ignored_fields.of(request, expanded.unknown_sampling_keys)
        self._rids.reserve(expanded)
        try:
            await self._complete(expanded, request)
            held = check_messages(expanded, limits, AnswerForm.of(request))
            self.limits  # noqa: B018 - raises if the server stopped while the prompt was tokenised
        except BaseException:
            self._rids.release(rid for message in expanded.messages for rid in sample_rids(message))
            raise
        now, version = time.monotonic(), self.weight_version
        groups = [[SampleRecord(sample, now, version) for sample in message.samples()] for message in expanded.messages]
        handle = GenerateHandle(
            [record for group in groups for record in group],
            replies_with_list=expanded.replies_with_list,
            tokenizer=self._tokenizer,
            form=ResponseForm.of(request, self._route_shape, limits.vocab_size, self._tokenizer, ignored),
            abort=self.abort,
            held=held,
        )
        self._dispatch(handle, groups, request.routed_dp_rank)
        return handle

    def submit_checked(
        self, message: TokenizedGenerateReqInput, form: ResponseForm, on_end: Callable[[], None]
    ) -> SingleHandle:
        """Send one sample that is known to pass the checks of `submit`.  `on_end` is called when it has ended.

        Raises `BadRequest` for an id in use, `Unavailable` when the server does not serve.
        """
        self.limits  # noqa: B018 - raises unless serving
        self._rids.reserve_one(message.rid)
        record = SampleRecord(message, time.monotonic(), self.weight_version)
        handle = SingleHandle(record, self._tokenizer, form, on_end, self.abort)
        self._in_flight.add(InFlightSample(record, handle, 0), None)
        try:
            self._link.send(message)
        except BaseException:
            self._forget(message.rid)
            raise
        return handle

    def abort(self, rids: Iterable[str]) -> None:
        """Abort requests, samples or groups by exact name; unknown names are ignored, as they may just have ended."""
        leaves = dict.fromkeys(leaf for rid in dict.fromkeys(rids) for leaf in self._rids.resolve(rid))
        self._rids.mark_aborted(leaf for leaf in leaves if leaf not in self._in_flight)
        sent = [leaf for leaf in leaves if leaf in self._in_flight]
        if sent and self.phase is not Phase.FAILED:
            self._link.send(AbortReqInput(rids=sent))

    def abort_all(self) -> None:
        """Abort every request, also those still being tokenised."""
        self._rids.mark_aborted(leaf for leaf in self._rids.leaves() if leaf not in self._in_flight)
        if self.phase is not Phase.FAILED:
            self._link.send(AbortReqInput(abort_all=True))

    async def control(
        self, verb: type[ControlReqInput[AnyReply]], *, timeout_s: float | None = None, **fields: Any
    ) -> ControlReqOutput[AnyReply]:
        """Send a control verb and return its answer, which may be a failure.

        Raises `Unavailable` when the server does not serve, `SchedulerTimeout` after `timeout_s` seconds (None: as the
        verb declares).
        """
        self.limits  # noqa: B018 - raises unless serving
        timeout_s = timeout_s or verb.endpoint.deadline_s(self.server_args.weight_update_timeout)
        answer = await self.communicator.call(verb, timeout_s, **fields)
        reply = answer.data
        if isinstance(reply, SchedulerState | CommitReply) and isinstance(reply.weight_version, str):
            self.weight_version = reply.weight_version
        return answer

    # --- messages ------------------------------------------------------------------------------------------------

    def handle_message(self, message: SchedulerOutput | Unreadable) -> None:
        """Act on one message.  Raises `StartupError` for one that cannot be read before the server serves."""
        self.num_messages += 1
        if isinstance(message, BatchTokenOutput):
            now = time.monotonic()
            for output in message.outputs:
                self._on_output(output, now)
        elif isinstance(message, ControlReqOutput):
            self.communicator.resolve(message)
        elif isinstance(message, Unreadable):
            self._on_unreadable(message)
        elif isinstance(message, AdaptersChanged):
            if self._limits is not None:
                self._limits.names.set_adapters(message.cards, message.awaited)
        else:
            self._on_startup(message)

    def _on_unreadable(self, message: Unreadable) -> None:
        """Fail the calls that it names; if it names none, all in flight, as any of them may have lost a part."""
        if self.phase is Phase.STARTING:
            raise StartupError(message.error)
        logger.error("a message of the scheduler cannot be read: %s", message.error)
        error = LockstepError(f"an answer of the scheduler cannot be read: {message.error}")
        if message.names_nobody:
            self.communicator.fail_all(error)
        for rid in self._in_flight.rids() if message.names_nobody else message.rids:
            self._fail_sample(rid, error)
        if message.request_id is not None:
            self.communicator.fail(message.request_id, error)
        if message.rest is not None:
            self.handle_message(message.rest)

    def _on_output(self, output: ReqOutput, now: float) -> None:
        entry = self._in_flight.get(output.rid)
        if entry is None:
            logger.warning("output for request %s, which is not in flight", output.rid)
            return
        self.weight_version = output.weight_version
        record = entry.record
        had_token = record.first_token_at is not None
        try:
            record.append(output, now)
        except LockstepError as error:
            logger.error("%s", error)
            self._fail_sample(output.rid, error)
            return
        if not had_token and record.first_token_at is not None:
            for observer in self._observers:
                observer.on_first_token(record)
        if output.finished is not None:
            self._forget(output.rid)
            for observer in self._observers:
                observer.on_finished(record)
        entry.handle.notify(entry.index)

    def _fail_sample(self, rid: str, error: LockstepError) -> None:
        """End a request whose record is not whole, and have the scheduler stop it."""
        entry = self._in_flight.get(rid)
        if entry is not None:
            self._forget(rid)
            self._link.send(AbortReqInput(rids=[rid]))
            entry.handle.fail(error)

    def _on_startup(self, message: SchedulerReady | SchedulerFailed) -> None:
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
        if isinstance(message, SchedulerFailed):
            logger.debug("scheduler traceback:\n%s", message.traceback)
            self.failure_message = message.message
            self.scheduler_failed.set()
            self.fail(message.message)
            if not self._ready.done():
                self._ready.set_exception(StartupError(message.message))
        else:
            self._ranks_ready.append(message)
            if len(self._ranks_ready) == self.server_args.dp_size and not self._ready.done():
                # A request must fit on every rank.
                slots = min(ready.max_total_num_tokens for ready in self._ranks_ready)
                self._ready.set_result(msgspec.structs.replace(self._ranks_ready[0], max_total_num_tokens=slots))

    # --- helpers -------------------------------------------------------------------------------------------------

    async def _complete(self, expanded: ExpandedRequest, request: GenerateReqInput) -> None:
        """Tokenise texts, check restrictions, and read routes: long texts and routes off the event loop."""
        if request.texts:
            for message, input_ids in zip(expanded.messages, await self.tokenizer.encode(request.texts), strict=True):
                message.input_ids = input_ids
        await self.restrictions.complete(expanded.messages)
        if request.replay_routed_experts is not None:
            await read_replays(expanded, request.replay_routed_experts_start_len, self._route_shape)

    def _dispatch(self, handle: GenerateHandle, groups: Sequence[Sequence[SampleRecord]], wanted: int | None) -> None:
        """Send every sample to a data-parallel rank: the `wanted` one, else the one with the least left to do.

        Samples that were aborted before they could be sent are answered here.  The samples of one prompt for one rank
        are one message.
        """
        index = itertools.count()
        messages: list[TokenizedGenerateReqInput] = []
        for group in groups:
            by_rank: dict[int, list[TokenizedGenerateReqInput]] = {}
            for record in group:
                rank = self._in_flight.add(InFlightSample(record, handle, next(index)), wanted)
                if self._rids.is_aborted(record.rid):
                    output = ReqOutput.never_ran(record.rid, record.weight_version, "Abort before prefill")
                    self._on_output(output, time.monotonic())
                else:
                    by_rank.setdefault(rank, []).append(record.source)
            messages += [TokenizedGenerateReqInput.of_samples(sources) for sources in by_rank.values()]
        try:
            self._link.send(*messages)
        except BaseException:
            for record in handle.records:
                if record.rid in self._in_flight:
                    self._forget(record.rid)
            raise
        for record in handle.records:
            record.source.replay = None  # may be large, and is not needed here any more

    def _forget(self, rid: str) -> None:
        self._in_flight.remove(rid)
        self._rids.release([rid])
