"""`EngineControl`: the engine's control calls that a sender makes; how refusals are read, and `EngineError`.

An HTTP client satisfies the protocol.  Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from weight_sync.errors import TransportError, WeightSyncError

Phase = Literal["verify", "commit"]


class EngineControl(Protocol):
    """The engine's control calls, named as its HTTP endpoints.  Each returns the reply and raises on a refusal.

    One without `get_world_size` has the number of ranks that `connect` is given, or one.  One that may be sent to per
    rank also has `weight_parts(names, dtypes, shapes)`, which answers with `placement_epoch`, `patterns` and `tensors`
    (`weight_sync.rank_boxes`).

    `takes_lists`: if it is True, `begin_weight_update` gets a manifest as an object of lists, `names`, `dtypes`,
    `shapes`, and `fingerprints`, the 16 hex digits of each tensor end to end.  A control without it gets entries.
    Lists of tensors may be `JsonList`s, which have their JSON.
    """

    def get_world_size(self) -> int:
        """Return how many ranks of the engine join a group."""

    def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str | None,
    ) -> Mapping[str, Any]:
        """Join a group.  An engine that has `weight_parts` takes `rank_ports`, too: a port of the sender for each rank,
        which joins it there in a group of two.  An engine that has a parameter `memory` gets the place of a token in
        the sender's memory (`weight_sync.sealed_memory`); its answer has `memory_token` if every rank has read it, else
        `memory_refused`, the reason.
        """

    def destroy_weights_update_group(self, *, group_name: str) -> Mapping[str, Any]: ...

    def begin_weight_update(
        self, *, weight_version: str | None, coverage: str, manifest: list[dict[str, Any]] | None, update_id: str
    ) -> Mapping[str, Any]:
        """Open an update.  An engine that takes `prepared_s` gets the seconds that the sender worked before, and one
        that has `weight_parts` and is sent to per rank `per_rank` and `placement_epoch`.
        """

    def update_weights_from_distributed(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str | None,
        weight_version: str | None,
        update_id: str,
    ) -> Mapping[str, Any]:
        """Receive a bucket.  One with boxes of tensors has `boxes`, too; one for each rank also `tensors_per_rank`.  An
        engine that has read the token gets `memory`, where the bucket lies.
        """

    def end_weight_update(self, *, update_id: str, phase: Phase | None = None) -> Mapping[str, Any]: ...

    def abort_weight_update(self, *, update_id: str) -> Mapping[str, Any]: ...

    def weight_update(self, *, update_id: str) -> Mapping[str, Any]:
        """Return the `outcome` of an update, with the answer of its end where that is `committed`."""


class EngineCalls(Protocol):
    """One engine's control calls on their way; `timeout_s` is the deadline of each."""

    timeout_s: float

    def call(self, verb: str, **fields: Any) -> Future[Any]: ...


def refusal(call: Future[Any]) -> BaseException | None:
    """Return the exception of a control call; None if it went well or still runs."""
    return call.exception() if call.done() else None


def refusals_of(calls: Mapping[str, Future[Any]]) -> dict[str, BaseException]:
    """Return the errors of calls that are over, by engine."""
    return {name: error for name, call in calls.items() if (error := refusal(call)) is not None}


def was_refused(error: BaseException) -> bool:
    """Return whether the engine has answered that it did not do what it was asked: a status of 4xx.

    Anything else leaves open whether it did: silence, a broken connection, an error on the way.
    """
    status = _status(error)
    return status is not None and 400 <= status < 500


def gave_no_answer(error: BaseException) -> bool:
    """Return whether nothing is known of the engine itself: it cannot be reached, is silent, or breaks off.

    An error with another status is the engine's own answer.
    """
    return _status(error) in (None, 502, 503, 504)


def was_not_found(error: BaseException) -> bool:
    """Return whether the engine has answered that it does not have what the call names, such as a group."""
    return _status(error) == 404


def to_blame(failures: Mapping[str, BaseException]) -> dict[str, BaseException]:
    """Return the failures that can have caused the others, of engines that share a group.

    The group of an engine that refuses or breaks off fails for all: they answer with a `TransportError`.
    """
    return {name: error for name, error in failures.items() if _status(error) != TransportError.status_code}


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status_code", getattr(error, "status", None))
    return status if isinstance(status, int) else None


class EngineError(WeightSyncError):
    """Engines failed a refresh, or a rendezvous.  `failures`: the error of each of them, or its missed deadline.

    `committed`: engines that have the new version all the same, as the failure came after their commit.  `unknown`:
    engines that did not answer whether they do; `weight_update(update_id)` asks them again.
    """

    status_code = 502

    def __init__(
        self,
        failures: Mapping[str, BaseException],
        committed: Sequence[str] = (),
        unknown: Sequence[str] = (),
        update_id: str | None = None,
    ) -> None:
        said = [f"engine {name}: {type(error).__name__}: {error}" for name, error in failures.items()]
        if committed:
            said.append(f"committed despite the failure: {', '.join(committed)}")
        if unknown:
            said.append(f"not known whether committed: {', '.join(unknown)} (update {update_id})")
        super().__init__("; ".join(said))
        self.failures = dict(failures)
        self.committed = list(committed)
        self.unknown = list(unknown)
        self.update_id = update_id
