"""`BucketSource`: what a transport offers to the updater.

A transport is one file beside this one.  It turns one control call into wire tensors and knows nothing of what becomes
of them: names, shapes, coverage, versions and commits are the transaction's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol, runtime_checkable

import torch

from weight_sync.errors import UnknownGroupError, WeightRequestError
from weight_sync.staging import ProvenPart
from weight_sync.tensor_meta import TensorMeta

Named = Sequence[tuple[str, torch.Tensor]]
Bucket = Named | ProvenPart


class BucketSource(Protocol):
    """The tensors of one control call.  Used once: `announce`, then `receive`."""

    @property
    def must_drain(self) -> bool:
        """Whether a refused call is still received, and thrown away: its sender sends before it can be told."""

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """The wire tensors that are known to come, by any names; empty where only receiving tells.

        Reads and checks what can be without taking memory for the content.  Raises `WeightRequestError` and its kinds,
        also for more than `max_bytes` of content.
        """

    def receive(self) -> Iterable[Bucket]:
        """The content as (name, tensor), in one or more buckets, or as this rank's parts of tensors.

        A bucket's tensors are the caller's only until the next one is asked for.  Raises `WeightRequestError` and its
        kinds, `TransportError`.  Every wait has a deadline.
        """


@runtime_checkable
class RefusableSource(BucketSource, Protocol):
    """A source whose sender can be told during the call that the call has failed."""

    def refuse(self, reason: str) -> None:
        """Tell the sender.  Called at most once, after any failure of the call, also of `announce` and `receive`.

        Raises nothing; every wait has a deadline.
        """


class RefusedSource:
    """A call that is refused for what it asks: nothing of it is received.  `leave`: the groups that it may concern."""

    must_drain = False

    def __init__(self, reason: str, leave: Callable[[], None]) -> None:
        self._reason = reason
        self._leave = leave

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        raise WeightRequestError(self._reason)

    def receive(self) -> Iterable[Named]:
        raise WeightRequestError(self._reason)

    def refuse(self, reason: str) -> None:
        with suppress(UnknownGroupError):
            self._leave()


def refuse(source: BucketSource, reason: str) -> None:
    """Tell the source's sender, if it can be told."""
    if isinstance(source, RefusableSource):
        source.refuse(reason)


def deliver(
    source: BucketSource,
    take: Callable[[Bucket], None],
    refusal: Exception | None = None,
    pace: Callable[[float], None] | None = None,
) -> None:
    """Hand every bucket to `take`, unless there is a `refusal`, which is raised.

    A source that must be drained is received to its end even so, and after `take` raised; then that is raised.
    `pace(seconds)` is called after every bucket that took so long to take.
    """
    if refusal is not None and not source.must_drain:
        raise refusal
    for bucket in source.receive():
        start = time.perf_counter()
        try:
            if refusal is None:
                take(bucket)
                if pace is not None:
                    pace(time.perf_counter() - start)
        except Exception as error:
            if not source.must_drain:
                raise
            refusal = error
    if refusal is not None:
        raise refusal


def turn_away(source: BucketSource, refusal: Exception, max_bytes: int) -> NoReturn:
    """Receive a call as far as its sender needs that, into nothing.  Raises `refusal`, or what else is wrong."""
    try:
        source.announce(max_bytes)
        deliver(source, lambda _: None, refusal)
    except Exception as error:
        refuse(source, str(error))
        raise
    raise refusal
