"""Differences of NCCL from gloo, handled so that every wait in a weight update group has an end.

* The first collective of a group connects its members.  The call returns once all have come, and has no deadline: it is
  made on a thread, and left there when its caller gives up.
* Later ones only put a kernel into a queue, and end in the order in which they were started.  The queue holds about a
  thousand; a call that finds it full waits for the sender, again without a deadline.  So a caller bounds how many it
  starts ahead (`receivers.distributed`).
* torch's watchdog ends the whole process over a collective that is late (`TORCH_NCCL_ASYNC_ERROR_HANDLING`).  So the
  deadline that NCCL gets lies behind ours, and the group is aborted in between.
* `work.wait()` lets the stream wait, not the host, and knows no timeout: a work is asked whether it is completed.
* torch keeps a message's tensor until its work was waited for, or another collective begins.  So each work is waited
  for, and memory that is released goes back to the device at once.
* Leaving a group in which a call is stuck may be stuck as well: that, too, is left to a thread.

Shown with `tests/nccl_weight_group_stand_in.py`; not run on several GPUs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait

import torch
import torch.distributed as dist

from weight_sync.waiting import in_thread

_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CHANGING_ENVIRON = threading.Lock()
"""Groups are joined on several threads."""
WATCHDOG_GRACE_S = 600.0
"""From our deadline of a collective to NCCL's own."""
_POLL_S = 0.0005


@contextlib.contextmanager
def errors_are_ours() -> Iterator[None]:
    """Leave errors of a peer to us in groups made inside: by default torch's watchdog ends the process over a
    trainer that died in a broadcast.
    """
    with _CHANGING_ENVIRON:
        before = os.environ.get(_ON_ERROR)
        os.environ[_ON_ERROR] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ON_ERROR]
            else:
                os.environ[_ON_ERROR] = before


def connect(
    process_group: dist.ProcessGroup, tensor: torch.Tensor, options: dist.BroadcastOptions
) -> Future[dist.Work]:
    """Start the first broadcast of a group on a thread of its own, in the order of this thread's stream."""
    stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

    def start() -> dist.Work:
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            return process_group.broadcast([tensor], options)

    return in_thread(start)


def is_over(work: dist.Work, seconds: float) -> bool:
    """Return whether `work` ends within `seconds`; work that follows in this thread's stream then comes after it.

    Raises the `RuntimeError` of a collective that failed.
    """
    until = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    work.wait()
    return True


def let_go(works: Sequence[dist.Work]) -> None:
    """Have torch let go of the tensors of works that are over."""
    for work in works:
        work.wait()


def leave(process_group: dist.ProcessGroup, *, broken: bool, timeout_s: float) -> None:
    """Leave the group; one that is `broken` is aborted first.  Returns at the latest after `timeout_s`."""

    def run() -> None:
        if broken:
            process_group.abort()
        if isinstance(process_group, dist.ProcessGroup):
            dist.destroy_process_group(process_group)
        else:  # torch's backend by itself
            process_group.shutdown()

    wait([in_thread(run)], timeout_s)
