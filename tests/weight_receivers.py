"""Several receivers of one group, a process each, and their reports on the buckets that came.

    python -m tests.weight_receivers RANK WORLD ELEMENTS PORT:LOAD_FORMAT ...      a group for each, BUCKETS of them

Each bucket is answered with one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from weight_sync.errors import WeightSyncError
from weight_sync.process_group import init_process_group
from weight_sync.receivers.distributed import PIECES, announced, layouts_of, receive_distributed
from weight_sync.tensor_meta import TensorMeta

BUCKETS = 3
TIMEOUT_S = 15.0
TENSORS = ("a", "b")

Answer = dict[str, Any]


def group_name(port: int) -> str:
    return f"receivers{port}"


def start(receivers: int, num_elements: int, groups: Sequence[tuple[int, str | None]]) -> list[subprocess.Popen]:
    """Start processes that join each group as ranks 1 to `receivers` and take buckets of two bfloat16 tensors."""
    told = [f"{port}:{load_format or ''}" for port, load_format in groups]
    command = [sys.executable, "-m", "tests.weight_receivers"]
    return [
        subprocess.Popen(
            [*command, str(rank), str(1 + receivers), str(num_elements), *told],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, 1 + receivers)
    ]


def answers(processes: Sequence[subprocess.Popen]) -> list[list[Answer]]:
    """Return what each process wrote, bucket by bucket; every process must have ended well."""
    result = []
    for process in processes:
        out, err = process.communicate(timeout=4 * TIMEOUT_S)
        assert process.returncode == 0, f"a receiver ended with {process.returncode}: {err[-600:]}"
        result.append([json.loads(line) for line in out.splitlines()])
    return result


def main() -> None:
    rank, world, num_elements = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    metas = [TensorMeta(name, torch.bfloat16, (num_elements,)) for name in TENSORS]
    for told in sys.argv[4:]:
        port, _, load_format = told.partition(":")
        group = init_process_group("127.0.0.1", int(port), rank, world, group_name(int(port)), "gloo", TIMEOUT_S)
        for _ in range(BUCKETS):
            try:
                messages = announced(metas, load_format or None)
                layouts = layouts_of(messages, in_turns=load_format == PIECES)
                parts = receive_distributed(group, messages, layouts, "cpu", TIMEOUT_S)
                answer: Answer = {
                    name: float(tensor.double().mean()) for part in parts for name, tensor in part.named()
                }
            except WeightSyncError as error:
                answer = {"error": type(error).__name__, "message": str(error), "broken": group.broken}
            print(json.dumps(answer), flush=True)
        group.destroy()


if __name__ == "__main__":
    main()
