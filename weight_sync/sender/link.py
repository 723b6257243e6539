"""One engine as the sender sees it: the group that both are in, control calls in threads, a bucket on its way.

Each engine has a group of its own with the sender, so that an engine that dies or hangs breaks no other one's.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weight_sync.bucket import cut_pieces
from weight_sync.engine_control import EngineControl, refusal, was_not_found
from weight_sync.errors import TransactionStateError, TransportError, WeightRequestError
from weight_sync.process_group import GroupHandle, free_port, init_process_group, leave_late, resolve_backend
from weight_sync.receivers.distributed import PIECE_BYTES, PIECES
from weight_sync.sender.lists import Manifest, TensorLists
from weight_sync.tensor_meta import TensorMeta
from weight_sync.waiting import in_thread

GRACE_S = 2.0
"""Over a deadline, for the engine's own error, which states more than that the deadline passed."""
_SETTLE_S = 0.5


@dataclass(frozen=True)
class Bucket:
    """The tensors that one call sends, end to end, broadcast in `pieces`, uint8, as `split_pieces` cuts them."""

    lists: TensorLists
    pieces: Sequence[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)


def split_pieces(metas: Sequence[TensorMeta], content: torch.Tensor) -> list[torch.Tensor]:
    """Return the content of a bucket, uint8 [bytes], as it is broadcast: views."""
    sizes = [sum(meta.nbytes for meta in piece) for piece in cut_pieces(metas, PIECE_BYTES)]
    return list(content.split(sizes)) if sizes else []


class EngineLink:
    """`timeout_s`: deadline of the rendezvous, of each bucket and of each call."""

    def __init__(self, name: str, control: EngineControl, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._control = control
        self._group: GroupHandle | None = None

    @property
    def is_connected(self) -> bool:
        return self._group is not None

    def connect(
        self,
        *,
        master_address: str,
        master_port: int | None,
        engine_world_size: int | None,
        group_name: str,
        backend: str | None,
        device: torch.device | str,
    ) -> None:
        """Join a group with the engine: this process is rank 0, the engine's ranks follow.

        `engine_world_size`: how many ranks the engine must have; None: any number.
        Raises what the engine refused, else `TransportError` or `WeightRequestError`.
        """
        num_ranks = self._num_ranks(engine_world_size)
        port = free_port() if master_port is None else master_port
        resolved = resolve_backend(backend, device)
        world_size = 1 + num_ranks
        call = self.call(
            "init_weights_update_group",
            master_address=master_address,
            master_port=port,
            rank_offset=1,
            world_size=world_size,
            group_name=group_name,
            backend=resolved,
        )
        joining = in_thread(
            init_process_group, master_address, port, 0, world_size, group_name, resolved, self.timeout_s
        )
        wait([call, joining], timeout=self.timeout_s + GRACE_S, return_when=FIRST_EXCEPTION)
        refused = refusal(call)
        if refused is not None or not joining.done():
            joining.add_done_callback(leave_late)  # it ends at its own deadline
            raise refused or TransportError(f"the engine did not join within {self.timeout_s:g} s")
        group = joining.result()
        if not call.done():
            group.destroy()
            raise TransportError(f"the engine joined, but did not answer within {self.timeout_s:g} s")
        self._group = group

    def _num_ranks(self, expected: int | None) -> int:
        """Ask the engine for the number of its ranks.  Raises `WeightRequestError` if others are expected."""
        if getattr(self._control, "get_world_size", None) is None:
            return 1 if expected is None else expected
        asked = self.call("get_world_size")
        wait([asked], timeout=self.timeout_s + GRACE_S)
        if not asked.done():
            raise TransportError(f"the engine did not report its number of ranks within {self.timeout_s:g} s")
        if isinstance(asked.exception(), AttributeError):  # a wrapper of a control that has no such call
            return 1 if expected is None else expected
        num_ranks = int(asked.result())
        if expected not in (None, num_ranks):
            raise WeightRequestError(
                f"engine_world_size is {expected}, but the engine has {num_ranks} ranks; leave it out"
            )
        return num_ranks

    def call(self, verb: str, **fields: Any) -> Future[Any]:
        """Start a control call.  An engine that does not take `prepared_s` does not get it; one that does not take
        lists gets the entries of a manifest.
        """
        control = getattr(self._control, verb)
        manifest = fields.get("manifest")
        if isinstance(manifest, Manifest):
            takes_lists = getattr(self._control, "takes_lists", False) is True  # a wrapper may have any attribute
            fields["manifest"] = manifest.as_lists() if takes_lists else manifest.as_entries()
        if "prepared_s" in fields and "prepared_s" not in inspect.signature(control).parameters:
            del fields["prepared_s"]
        return in_thread(control, **fields)

    def start(self, bucket: Bucket, weight_version: str | None, update_id: str) -> Sending:
        """Send a bucket without waiting.  What `bucket.pieces` hold must not change until it is done."""
        if self._group is None:
            raise TransactionStateError(f"engine {self.name} is not connected; connect first")
        call = self.call(
            "update_weights_from_distributed",
            names=bucket.lists.names,
            dtypes=bucket.lists.dtypes,
            shapes=bucket.lists.shapes,
            group_name=self._group.name,
            load_format=PIECES,
            weight_version=weight_version,
            update_id=update_id,
        )
        return Sending(self, self._group, call, bucket)

    def leave(self) -> None:
        """Leave the group and have the engine leave it, unless it has.

        Raises what the engine refused; the group is left anyway.
        """
        group, self._group = self._group, None
        if group is None:
            return
        try:
            call = self.call("destroy_weights_update_group", group_name=group.name)
            wait([call], timeout=self.timeout_s)
            if not call.done():
                raise TransportError(f"the engine did not leave the group within {self.timeout_s:g} s")
            refused = refusal(call)
            if refused is not None and not was_not_found(refused):
                raise refused
        finally:
            group.destroy()

    def leave_failed(self) -> None:
        """Leave a group that broke, on both sides: a broadcast pending here ends when the engine closes its end."""
        group, self._group = self._group, None
        if group is None:
            return
        group.broken = True
        # The engine may have left, hang, or have died.  If it hangs, leaving waits for the broadcast's deadline.
        wait([self.call("destroy_weights_update_group", group_name=group.name)], timeout=GRACE_S)
        wait([in_thread(group.destroy)], timeout=GRACE_S)


class Sending:
    """One bucket on its way to one engine: the broadcasts and `call`, the engine's answer.  `poll` until it is done."""

    def __init__(self, link: EngineLink, group: GroupHandle, call: Future[Any], bucket: Bucket) -> None:
        self.link = link
        self.bucket = bucket
        self._group = group
        self.call = call
        self._works: list[dist.Work] = []
        self._deadline = time.monotonic() + link.timeout_s
        self._broke: TransportError | None = None
        self._reason_deadline = 0.0
        self._is_sent = False
        self._failure: BaseException | None = None
        try:
            for piece in bucket.pieces:
                self._works.append(group.start_broadcast(piece, link.timeout_s))
        except TransportError as error:
            self._break(error)

    def poll(self) -> bool:
        """Return whether the sending is over.  Waits only to leave a group that broke, and not for long."""
        if self._failure is not None:
            return True
        now = time.monotonic()
        if not self.link.is_connected:
            self._failure = TransportError("the group ended with an earlier bucket")
        elif self._broke is not None:
            # The engine's own reason is the better one, if it has one.
            if self.call.done() or now > self._reason_deadline:
                self._fail(refusal(self.call) or self._broke, self._broke)
        elif self._is_sent:
            if self.call.done():
                self._failure = refusal(self.call)
                return True
            if now > self._deadline + GRACE_S:
                within = f"within {self.link.timeout_s:g} s"
                self._fail(TransportError(f"the engine took a bucket, but did not answer {within}"))
        elif all(work.is_completed() for work in self._works):
            self._finish_broadcast()
        elif now > self._deadline:
            self._break(TransportError(f"the engine did not take a bucket within {self.link.timeout_s:g} s"))
        elif refusal(self.call) is not None:
            self.shorten_deadline(_SETTLE_S)  # refused after it was received: soon done then
        return self._failure is not None

    @property
    def has_begun(self) -> bool:
        """True once the engine has taken up this bucket: it has the first piece, or answered."""
        return self._failure is not None or self.call.done() or any(work.is_completed() for work in self._works[:1])

    def shorten_deadline(self, within_s: float) -> None:
        """Give the bucket no longer than `within_s` seconds from now."""
        self._deadline = min(self._deadline, time.monotonic() + within_s)

    @property
    def failure(self) -> BaseException | None:
        """The error of a sending that is over; None: the engine has the bucket."""
        return self._failure

    def _finish_broadcast(self) -> None:
        try:
            for work in self._works:
                self._group.finish(work, self._deadline)
            self._is_sent = True
        except TransportError as error:
            self._break(error)

    def _break(self, error: TransportError) -> None:
        self._broke = error
        self._reason_deadline = time.monotonic() + GRACE_S

    def _fail(self, error: BaseException, cause: TransportError | None = None) -> None:
        """Give up the group, which is of no use any more."""
        if cause is not None and cause is not error:
            error.__cause__ = cause
        self._failure = error
        self.link.leave_failed()
