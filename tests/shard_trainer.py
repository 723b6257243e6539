"""Six trainer processes that send their own shards at once to engines: two pipeline stages and four expert ranks.

    python -m tests.shard_trainer CHECKPOINT PLAYS URL [URL...]

    rank 0, 1    dense tensors of the first layers, and of the others; of embedding, head and one projection half
    rank 2 .. 5  two ranks of expert parallelism by two of expert tensor parallelism; and all norms, as replicas

PLAYS is a list of "good" and "POINT:RANK", such as "in_bucket:3": that rank is killed at that point (`arm`).  After
each play every engine must serve one version, wholly.  The launcher imports everything once and forks the ranks.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from rollout.client import RolloutClient
from tests.model_zoo import logical_tensors
from weight_sync.boxes import Box, index_of, whole_box
from weight_sync.errors import WeightRequestError, WeightSyncError
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.joint_update import JointUpdate
from weight_sync.process_group import GroupHandle, free_port
from weight_sync.sender import Shard, ShardSender, WeightUpdate
from weight_sync.sender.shard_sender import JoinedUpdate
from weight_sync.tensor_meta import TensorMeta

NUM_RANKS = 6
TIMEOUT_S = 30.0
PLAY_S = 150.0
SETTLE_S = 30.0
BUCKET_BYTES = 12 << 10
Tensors = dict[str, torch.Tensor]


# --- content -----------------------------------------------------------------------------------------------------


def content(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    """Return one version of all logical tensors."""
    random = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(shape, generator=random) * 0.05).bfloat16() for name, shape in shapes.items()}


def digest_of(tensors: Tensors) -> str:
    metas = ((TensorMeta(name, each.dtype, tuple(each.shape)), each) for name, each in tensors.items())
    return digest((meta, fingerprint(each)) for meta, each in metas)


def shards_of(tensors: Tensors, rank: int) -> list[Shard]:
    """Return what one rank has."""
    found = []
    for name, tensor in tensors.items():
        for box in boxes_of(name, tuple(tensor.shape), rank):
            found.append(Shard(name, tuple(tensor.shape), box, tensor[index_of(box)].clone()))
    return found + [shard for shard in expert_shards(tensors, rank - 2) if rank >= 2]


def boxes_of(name: str, shape: tuple[int, ...], rank: int) -> Iterator[Box]:
    """Yield the boxes that a rank has of a dense tensor."""
    if ".experts." in name:
        return
    if rank >= 2:
        if "norm" in name:
            yield whole_box(shape)
        return
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield ((rank * shape[0] // 2, (rank + 1) * shape[0] // 2), (0, shape[1]))
    elif name.endswith("layers.0.self_attn.o_proj.weight"):
        yield ((0, shape[0]), (rank * shape[1] // 2, (rank + 1) * shape[1] // 2))
    elif (".layers.0." in name or ".layers.1." in name) == (rank == 0):
        yield whole_box(shape)


def expert_shards(tensors: Tensors, rank: int) -> Iterator[Shard]:
    """Yield the fused shards of an expert rank: half of the experts, and of each half of the width."""
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in sorted(layers):
        one = lambda expert, part: tensors[f"{layer}.experts.{expert}.{part}_proj.weight"]  # noqa: B023, E731
        count = len({name.split(".experts.")[1].split(".")[0] for name in tensors if name.startswith(f"{layer}.exp")})
        gate_up = torch.stack([torch.cat([one(e, "gate"), one(e, "up")]) for e in range(count)])
        down = torch.stack([one(e, "down") for e in range(count)])
        (half, part), (hidden, width) = divmod(rank, 2), down.shape[1:]
        experts, rows = (half * count // 2, (half + 1) * count // 2), (part * width // 2, (part + 1) * width // 2)
        up_rows = (width + rows[0], width + rows[1])
        for name, whole, box in (
            ("gate_up_proj", gate_up, (experts, rows, (0, hidden))),
            ("gate_up_proj", gate_up, (experts, up_rows, (0, hidden))),
            ("down_proj", down, (experts, (0, hidden), rows)),
        ):
            yield Shard(f"{layer}.experts.{name}", tuple(whole.shape), box, whole[index_of(box)].clone())


# --- one rank ----------------------------------------------------------------------------------------------------


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def after(calls: int, owner: type, name: str, then: Callable[..., Any] = die) -> None:
    """Have this process die at a call of a method, after `calls` calls of it."""
    usual, count = getattr(owner, name), iter(range(1 << 30))

    @functools.wraps(usual)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return usual(self, *arguments, **named) if next(count) < calls else then(self, *arguments, **named)

    setattr(owner, name, call)


def arm(point: str, *, leads: bool) -> None:
    """Have this process die at a point of the refresh."""
    if point == "before_begin":
        after(0, WeightUpdate if leads else JoinedUpdate, "_begin")
    elif point == "in_bucket":  # the engine has the call, and waits for the content
        after(0, GroupHandle, "start_broadcast", lambda *_, **__: (time.sleep(0.5), die()))
    elif point == "between_buckets":
        after(1, WeightUpdate, "send_bucket")
    elif point == "before_end":
        after(0, WeightUpdate, "flush")
    elif leads:  # engines have the call to commit, and their answer is lost
        usual = JointUpdate._ask

        def ask(self: Any, phase: dict[str, Any]) -> Any:
            if phase.get("phase") == "verify":
                return usual(self, phase)
            self._call("end_weight_update", self._active, **phase)
            time.sleep(0.05)
            die()

        JointUpdate._ask = ask  # type: ignore[method-assign]
    else:
        after(0, JoinedUpdate, "_end")


def run_rank(rank: int, port: int, tensors: Tensors, label: str, point: str | None, urls: list[str]) -> None:
    """Send one version; exit with 0 if it was sent, and 3 if it failed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    sender = ShardSender({f"engine{n}": RolloutClient(url) for n, url in enumerate(urls)}, timeout_s=TIMEOUT_S)
    try:
        sender.connect(group_name=label, shared=True)
        raise AssertionError("engines could wait for one another")
    except WeightRequestError as error:
        assert "leave out shared" in str(error) and not sender.connected
    sender.connect(group_name=label)
    if point is not None:
        arm(point, leads=rank == 0)
    status = 0
    try:
        report = sender.refresh_shards(shards_of(tensors, rank), label, bucket_bytes=BUCKET_BYTES)
        assert report.num_buckets > 1 and report.digest == digest_of(tensors)
    except WeightSyncError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        status = 3
    sender.close()
    os._exit(status)


def forked(rank: int, *arguments: Any) -> int:
    """Return the id of a new process that is the rank."""
    pid = os.fork()
    if pid == 0:
        try:
            run_rank(rank, *arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(4)
    return pid


def ended(pids: list[int], within_s: float) -> list[int]:
    """Return how the processes ended: an exit status, or minus a signal.  Kill the ones that do not end."""
    deadline, found = time.monotonic() + within_s, dict[int, int]()
    while len(found) < len(pids):
        for pid in set(pids) - found.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                found[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return [found[pid] for pid in pids]


# --- plays -------------------------------------------------------------------------------------------------------


def judge(urls: list[str], digests: dict[str, str], expected: set[str]) -> None:
    """Require that each engine serves one version wholly, that it is an expected one, and that none is open."""
    for url in urls:
        client, deadline = RolloutClient(url), time.monotonic() + SETTLE_S
        while client.weight_update()["open"] and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not client.weight_update()["open"], "an update is still open"
        label = client.weight_version()
        found = client.weights_checker()["per_engine_checksum"]
        assert label in expected, f"{url} serves {label}, not one of {expected}"
        assert found == digests[label], f"{url} does not serve what {label} is"


def judged(*arguments: Any) -> None:
    """Judge in a process of its own, so that this one keeps to one thread and may fork."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            judge(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert ended([pid], PLAY_S) == [0], "an engine does not serve what it must"


def play(name: str, number: int, shapes: dict[str, tuple[int, ...]], urls: list[str], served: dict[str, str]) -> None:
    """Play one refresh.  `served`: the digest of each label that an engine may serve; the new one is added."""
    point, _, victim = name.partition(":")
    label, tensors, port = f"step-{number}", content(shapes, number), free_port()
    old, dies = set(served), int(victim) if victim else None
    served[label] = digest_of(tensors)
    pids = [forked(rank, port, tensors, label, point if rank == dies else None, urls) for rank in range(NUM_RANKS)]
    statuses = ended(pids, PLAY_S)
    if dies is None:
        assert statuses == [0] * NUM_RANKS, statuses
        expected = {label}
    elif point == "in_end":
        assert statuses[dies] == -signal.SIGKILL and 4 not in statuses, statuses
        expected = old | {label} if dies == 0 else {label}
    else:
        assert statuses == [-signal.SIGKILL if rank == dies else 3 for rank in range(NUM_RANKS)], statuses
        expected = old
    judged(urls, served, expected)
    for gone in set(served) - expected:
        del served[gone]


def main(checkpoint: str, plays: str, *urls: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in logical_tensors(Path(checkpoint)).items()}
    served: dict[str, str] = {}
    for number, name in enumerate(plays.split(",")):
        start = time.monotonic()
        play(name, number + 1, shapes, list(urls), served)
        print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
