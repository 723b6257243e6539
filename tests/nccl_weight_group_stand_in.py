"""A process group over NCCL as its member sees it, without a GPU: calls that return late, works that end late.

Of torch's `ProcessGroupNCCL`: the first collective returns once all members have come (`others_come`); a work is
completed once rank 0 has sent (`deliver`), and its `wait` returns before; one that is not completed at the deadline it
was given ends the process (`ended_process`); `abort` while a call connects does not return.
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
        self.waits = 0

    def deliver(self, content: torch.Tensor) -> None:
        self._tensor.copy_(content)
        self._is_done = True

    def is_completed(self) -> bool:
        return self._is_done

    def wait(self) -> bool:
        self.waits += 1
        return True

    @property
    def would_end_the_process(self) -> bool:
        return not self._is_done and time.monotonic() > self._deadline


class NcclGroupStandIn:
    def __init__(self) -> None:
        self.others_come = threading.Event()
        self.works: list[NcclWorkStandIn] = []
        self.was_aborted = False
        self._connecting = False

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> NcclWorkStandIn:
        (tensor,) = tensors
        self._connecting = True
        self.others_come.wait()
        self._connecting = False
        work = NcclWorkStandIn(tensor, time.monotonic() + options.timeout.total_seconds())
        self.works.append(work)
        return work

    def abort(self) -> None:
        if self._connecting:
            self.others_come.wait()
        self.was_aborted = True

    @property
    def ended_process(self) -> bool:
        return any(work.would_end_the_process for work in self.works)
