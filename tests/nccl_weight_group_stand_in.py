"""A process group over NCCL as its member sees it, without a GPU: calls that return late, works that end late.

Of torch's `ProcessGroupNCCL`: the first collective returns once all members have come (`others_come`); a work is
completed once rank 0 has sent (`deliver`), and its `wait` returns before; one that is not completed at the deadline it
was given ends the process (`ended_process`); `abort` while a call connects does not return.  Works end in the order in
which they were started.  A call that finds `queue_length` of them under way waits until one has ended, without a
deadline.
"""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist


class NcclWorkStandIn:
    def __init__(self, tensor: torch.Tensor, deadline: float) -> None:
        self._tensor, self._deadline = tensor, deadline
        self._is_done = False
        self.was_asked = False
        self.waits = 0

    @property
    def num_bytes(self) -> int:
        return self._tensor.nbytes

    def deliver(self, content: torch.Tensor) -> None:
        self._tensor.copy_(content)
        self._is_done = True

    def is_completed(self) -> bool:
        self.was_asked = True
        return self._is_done

    def wait(self) -> bool:
        self.waits += 1
        return True

    @property
    def would_end_the_process(self) -> bool:
        return not self._is_done and time.monotonic() > self._deadline


class NcclGroupStandIn:
    def __init__(self, queue_length: int = 1000) -> None:
        self.others_come = threading.Event()
        self.works: list[NcclWorkStandIn] = []
        self.threads: list[int] = []
        """Names the thread of each call."""
        self.largest_window = (0, 0)
        """Messages and bytes that were under way at once."""
        self.was_aborted = False
        self._connecting = False
        self._queue_length = queue_length
        self._has_room = threading.Condition()
        self._num_sent = 0

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> NcclWorkStandIn:
        (tensor,) = tensors
        self._connecting = True
        self.others_come.wait()
        self._connecting = False
        work = NcclWorkStandIn(tensor, time.monotonic() + options.timeout.total_seconds())
        with self._has_room:
            self._has_room.wait_for(lambda: not self._is_full)
            self.works.append(work)
            self.threads.append(threading.get_ident())
            under_way = self.works[self._num_sent :]
            num_bytes = sum(one.num_bytes for one in under_way)
            self.largest_window = max(self.largest_window[0], len(under_way)), max(self.largest_window[1], num_bytes)
        return work

    def send(self, content: torch.Tensor) -> None:
        """Send the next message as rank 0, once the receiver waits for it or a later one, or can start no more."""
        while not (self._is_full or any(work.was_asked for work in self.works[self._num_sent :])):
            time.sleep(0.0005)
        self.works[self._num_sent].deliver(content)
        with self._has_room:
            self._num_sent += 1
            self._has_room.notify_all()

    def abort(self) -> None:
        if self._connecting:
            self.others_come.wait()
        self.was_aborted = True

    @property
    def _is_full(self) -> bool:
        return len(self.works) - self._num_sent >= self._queue_length

    @property
    def ended_process(self) -> bool:
        return any(work.would_end_the_process for work in self.works)
