"""One refresh that must be refused, at two layers: the state served before it must be served after it.

UpdaterTarget    an updater, and weights in memory
EngineTarget     a scheduler of one rank or of several, with requests under way and a prefix in the cache
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import torch
from safetensors.torch import save

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.io_struct import ContinueGenerationReqInput, ControlReqOutput, GetStateReqInput
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from rollout.scheduler.scheduler import Scheduler
from tests.logical_weights_fake import FakeWeights, bits
from tests.loopback_updater import LoopbackSource, LoopbackUpdater
from tests.scheduler_harness import Harness, Result
from tests.troubleshooting import require_entry
from weight_sync.checker import live_fingerprints
from weight_sync.errors import WeightSyncError
from weight_sync.fingerprint import digest
from weight_sync.receivers.base import BucketSource
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import dtype_name
from weight_sync.transaction import WeightTransaction

Tensors = dict[str, torch.Tensor]
REFUSALS = (WeightSyncError, OSError)
INVENTED = re.compile(
    "no such luck|no such tensor|no vote in time|the sender is gone|broken pipe|a fault of one rank"
)  # fmt: skip
"""Messages of injected faults.  All others have an entry in docs/troubleshooting."""
PROBE = [3, 1, 4, 1, 5, 9, 2, 6]
PROBED, RUNNING = 4, 40
"""Tokens of a probe, and of each request under way."""


@dataclass(frozen=True)
class Refusal:
    """The first refusal of a refresh.  `kind`: the class of an error, or the status of an answer."""

    kind: type[BaseException] | int
    message: str

    def is_a(self, kind: type[Exception] | tuple[int, ...]) -> bool:
        """Return whether it is an error of this class, or has one of these statuses."""
        if isinstance(kind, tuple):
            return self.kind in kind
        return isinstance(self.kind, type) and issubclass(self.kind, kind)


class Target(Protocol):
    """A holder of one version of the weights, which can be refreshed."""

    def served(self) -> object:
        """Return everything that a refused refresh must leave as it was, in a form that can be compared."""

    def refresh(self) -> None:
        """Refresh to other weights.  Raises unless they come into force."""


def require_unchanged(
    target: Target, refuse: Callable[[], Refusal], kind: type[Exception] | tuple[int, ...], reason: str
) -> None:
    """Require that a refresh is refused with `reason`, changes nothing, and that the next one comes into force."""
    before = target.served()
    refusal = refuse()
    assert re.search(reason, refusal.message) and refusal.is_a(kind), refusal
    if not INVENTED.search(refusal.message):
        require_entry(refusal.message)
    assert target.served() == before
    target.refresh()
    assert target.served() != before, "the comparison sees no refresh"


# --- an updater -------------------------------------------------------------------------------------------------------


class UpdaterTarget:
    """Weights, and an updater of one rank.  `now`: its clock.  `votes`: answers of another rank, which agrees
    when they are used up.  `voted`: its own votes.
    """

    def __init__(self, weights: Any, good: Tensors, staging: StagingMode = "host", **settings: Any) -> None:
        self.weights, self.good = weights, good
        self.now = 0.0
        self.votes: list[bool | Exception] = []
        self.voted: list[bool] = []
        self.labels: list[str | None] = []
        self._last: WeightTransaction | None = None
        self.updater = LoopbackUpdater(
            weights, device="cpu", timeout_s=10.0, vote=self._vote, clock=lambda: self.now, staging=staging, **settings
        )

    def _vote(self, mine: bool) -> bool:
        self.voted.append(mine)
        theirs = self.votes.pop(0) if self.votes else True
        if isinstance(theirs, Exception):
            raise theirs
        return mine and theirs

    def served(self) -> object:
        """Return every bit in every place, the digest, published labels, and whether anything is left of an update."""
        metas, prints = self.weights.metas(), live_fingerprints(self.weights)
        places = [_hash(place.read()) for name in metas for place in self.weights.places(name)]
        derived = self.weights.snapshot() if isinstance(self.weights, FakeWeights) else []
        whole = digest((meta, prints[name]) for name, meta in metas.items())
        left = 0 if self._last is None else self._last._staging.num_bytes
        updater = self.updater
        return places, derived, whole, tuple(self.labels), updater.is_open, updater.is_dirty, updater.torn, left

    def attempt(self, sources: Iterable[BucketSource], version: str = "v2", **begin: Any) -> Refusal:
        """Refresh as a trainer that ignores answers: begin, every bucket, verify, commit.

        Returns the first refusal.  Raises `AssertionError` if there was none.
        """
        refusals: list[BaseException] = []

        def call(step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            try:
                return step(*arguments, **named)
            except REFUSALS as error:
                refusals.append(error)
                return None

        call(self.updater.begin, version, **begin)
        self._last = None if self.updater.update is None else self.updater.update.transaction
        for source in sources:
            call(self.updater.receive, source)
        call(self.updater.verify)
        done = call(self.updater.commit)
        if done is not None:
            self.labels.append(done.weight_version)
        if self.updater.is_open:
            self.updater.abort()
        assert refusals, "nothing was refused"
        return Refusal(type(refusals[0]), str(refusals[0]))

    def refresh(self) -> None:
        self.updater.begin("good")
        self.updater.send(list(self.good.items()))
        self.updater.verify()
        self.labels.append(self.updater.commit().weight_version)
        self._last = None


# --- an engine --------------------------------------------------------------------------------------------------------


class EngineTarget:
    """A scheduler of one rank or of several, whose tensors come in bodies, or as if a group had broadcast them."""

    def __init__(self, engine: Harness, good: Tensors, *, flushes: bool = False) -> None:
        """Prepare an engine, and cache the probe.  `flushes`: the refresh itself empties the cache."""
        self.engine, self.good, self._flushes = engine, good, flushes
        self._ranks = getattr(engine, "num_dp_ranks", None)
        self._underway: list[str] = []
        self.control(WeightsCheckerReqInput, action="checksum")  # from now on the label in force has a digest
        self._probe()

    @property
    def schedulers(self) -> list[Scheduler]:
        return getattr(self.engine, "schedulers", None) or [self.engine.scheduler]

    def _probe(self) -> list[Result]:
        fields = [{}] if self._ranks is None else [{"dp_rank": rank} for rank in range(self._ranks)]
        rids = [self.engine.submit(PROBE, params={"max_new_tokens": PROBED}, **field) for field in fields]
        self.engine.run()
        return [self.engine.results[rid] for rid in rids]

    def start_requests(self) -> None:
        """Start two requests for each data-parallel rank, and let them sample a few tokens."""
        for number in range(2 * (self._ranks or 1)):
            field = {} if self._ranks is None else {"dp_rank": number % self._ranks}
            prompt = [number + 1, *PROBE]  # shares no prefix with the probe, which would cache it again
            self._underway.append(self.engine.submit(prompt, params={"max_new_tokens": RUNNING}, **field))
        for _ in range(5):
            self.engine.tick()

    def served(self) -> object:
        """Let requests end; return every rank's bits and labels, the digest, the state, and the answer to a probe.

        The probe finds its prompt in the cache, under the label in force.
        """
        self.engine.run()
        labels = {label for rid in self._underway for label, _, _ in self.engine.results[rid].versions}
        found = [result.finished.cached_tokens for result in self._probe() if result.finished is not None]
        state = self.control(GetStateReqInput).data
        update = state["weight_update"]
        return (
            [self._rank(scheduler) for scheduler in self.schedulers],
            self.control(WeightsCheckerReqInput, action="checksum").data["digest"],
            (state["weight_version"], state["paused"], state["poisoned"], update["open"], update["steps_held"]),
            labels | {state["weight_version"]},
            None if self._flushes else found,
            [_answer(result) for result in self._probe()],
        )

    def _rank(self, scheduler: Scheduler) -> object:
        state = scheduler.runner.state
        weights, placement = state.model.weights, getattr(state, "placement", None)
        places = [_hash(place.read()) for name in weights.metas() for place in weights.places(name)]
        slots = None if placement is None else placement.metadata.physical_to_logical_map.tolist()
        return places, state.epoch, slots

    def control(self, verb: type, **fields: Any) -> ControlReqOutput:
        return self.engine.control(verb, **fields)

    def in_body(self, tensors: Tensors) -> ControlReqOutput:
        payload = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        return self.control(UpdateWeightsFromTensorReqInput, payload=bytearray(payload), format="safetensors")

    def broadcast(self, tensors: Tensors, **fields: Any) -> ControlReqOutput:
        """Send a bucket by the verb of a broadcast, whose tensors are handed in where a group would deliver them."""
        source = {UpdateWeightsFromDistributedReqInput: lambda *_: LoopbackSource(list(tensors.items()))}
        with mock.patch.dict(SOURCES, source):
            return self.control(
                UpdateWeightsFromDistributedReqInput,
                names=list(tensors),
                dtypes=[dtype_name(tensor.dtype) for tensor in tensors.values()],
                shapes=[list(tensor.shape) for tensor in tensors.values()],
                **fields,
            )

    def attempt(self, buckets: Sequence[Tensors], *, aborts: bool = False, in_body: bool = False) -> Refusal:
        """Refresh as a trainer that ignores answers: begin, every bucket, end.  `aborts`: an abort before the end.

        Returns the first refusal.  Raises `AssertionError` if there was none.
        """
        self.start_requests()
        send = self.in_body if in_body else self.broadcast
        answers = [self.control(BeginWeightUpdateReqInput, weight_version="v2"), *map(send, buckets)]
        if aborts:
            answers.append(self.control(AbortWeightUpdateReqInput))
        answers.append(self.control(EndWeightUpdateReqInput))
        return first_refusal(answers)

    def refresh(self) -> None:
        answers = [self.control(BeginWeightUpdateReqInput, weight_version="good"), self.in_body(self.good)]
        answers.append(self.control(EndWeightUpdateReqInput))
        assert all(answer.success for answer in answers), answers

    def go_on(self) -> None:
        """End a pause, as a trainer does after the reason of its failure was returned."""
        assert self.control(ContinueGenerationReqInput).data["paused"] is False


def first_refusal(answers: Iterable[ControlReqOutput]) -> Refusal:
    """Return the first refusal among the answers.  Raises `AssertionError` if there is none."""
    refused = next((answer for answer in answers if not answer.success), None)
    assert refused is not None, "nothing was refused"
    return Refusal(refused.status_code, refused.message)


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bits(tensor)).hexdigest()


def _answer(result: Result) -> object:
    """Return the parts of an answer that must be the same again."""
    end = result.finished
    assert end is not None
    kv = end.prefill_weight_versions, end.kv_weight_version_oldest, end.cached_tokens
    return result.token_ids, result.logprobs, result.versions, result.routes.tolist(), kv


def without(name: str) -> Callable[[Tensors], Tensors]:
    """Leave one tensor out."""
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def in_two(tensors: Tensors) -> list[Tensors]:
    """Return two buckets that cut through fused tensors: every other name."""
    names = sorted(tensors)
    return [{name: tensors[name] for name in part} for part in (names[::2], names[1::2])]


@contextmanager
def raising_on(weights: Any, kind: type, step: str) -> Iterator[None]:
    """Make a step of a staging raise on the rank whose weights these are; of "write" both forms."""

    def faulty(inner: Any) -> Any:
        def call(staging: Any, *arguments: Any) -> Any:
            if staging._weights is weights:
                raise OSError("a fault of one rank")
            return inner(staging, *arguments)

        return call

    steps = ("write", "write_spans") if step == "write" else (step,)
    with mock.patch.multiple(kind, **{name: faulty(getattr(kind, name)) for name in steps}):
        yield
