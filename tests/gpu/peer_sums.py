"""One rank of a group on one device, as a process: `python -m tests.gpu.peer_sums RANK RANKS STORE_FILE`.

It sums tensors by memory that the ranks share: kernel by kernel, then as a captured graph that is replayed with other
values.  The reference gathers the parts on the host.  The process ends with status 0 if every bit is the reference's.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from rollout.distributed.communicator import Communicator
from rollout.distributed.peer_memory import connect_peers
from rollout.distributed.transport import gloo_transport
from rollout.kernels.ops import plain_ops

SHAPES = ((1, 2048), (64, 2048), (3, 7), (128, 2048))
TIMEOUT_S = 60.0


def main() -> None:
    rank, ranks, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    host = gloo_transport(dist.FileStore(path, ranks), rank, ranks, TIMEOUT_S, loopback=True)
    group = Communicator("tp", rank, ranks, host, host, TIMEOUT_S)
    group.peers = connect_peers(group, device)
    assert group.peers is not None, "the memory of the other rank cannot be opened"
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            held = torch.empty(shape, dtype=dtype, device=device)

            def fill(held: torch.Tensor = held) -> torch.Tensor:
                part = torch.randn(held.shape, generator=generator).to(held.dtype)
                held.copy_(part)
                return plain_ops().sum_in_order(group.all_gather(part))

            want = fill()
            assert torch.equal(group.all_reduce(held).cpu(), want)  # compiles the kernel, too
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                total = group.all_reduce(held)
            for _ in range(20):
                want = fill()
                graph.replay()
                assert torch.equal(total.cpu(), want), (dtype, shape)
    group.all_agree(True)  # neither ends while the other reads its memory


if __name__ == "__main__":
    main()
