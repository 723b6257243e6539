"""A trainer in a process of its own, on the engine's device.

    python -m benchmarks.gpu.trainer SPEC DEVICE BUCKET_BYTES

It holds its weights in buckets, each one allocation, and sends them in one of `WAYS` whenever it is asked.  It and the
engine's process speak lines of JSON:

    engine  -> trainer   {"way": "handles", "label": "v1", "layers": 2}      send the first layers; null: all
    trainer -> engine    {"id": 3, "verb": "begin_weight_update", "fields": {...}}
    engine  -> trainer   {"id": 3, "success": true, "message": "", "reply": {...}}
    trainer -> engine    {"done": true}

NCCL refuses two processes on one card, so groups are gloo's, and their bytes pass through the host.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from queue import Queue
from typing import Any

import torch
import torch.multiprocessing

from examples.make_checkpoint.run import CheckpointSpec, random_weights
from weight_sync.process_group import GroupHandle, free_port, init_process_group
from weight_sync.sender import WeightSender
from weight_sync.tensor_meta import dtype_name

TIMEOUT_S = 240.0
Named = list[tuple[str, torch.Tensor]]


class Engine:
    """The engine's control calls over the pipe; what `WeightSender` takes as an engine."""

    takes_lists = True

    def __init__(self) -> None:
        self.commands: Queue[dict[str, Any] | None] = Queue()
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._writing = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        return lambda **fields: self.start(verb, **fields).result(TIMEOUT_S)

    def get_world_size(self) -> int:
        return 1

    def start(self, verb: str, **fields: Any) -> Future[Any]:
        """Start a call.  The future raises `RuntimeError` for a refusal."""
        number, answer = next(self._numbers), Future[Any]()
        self._answers[number] = answer
        self.say(id=number, verb=verb, fields=fields)
        return answer

    def say(self, **fields: Any) -> None:
        with self._writing:
            print(json.dumps(fields), flush=True)

    def _read(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "id" not in message:
                self.commands.put(message)
            elif message["success"]:
                self._answers.pop(message["id"]).set_result(message["reply"])
            else:
                self._answers.pop(message["id"]).set_exception(RuntimeError(message["message"]))
        self.commands.put(None)


class Trainer:
    """`buckets`: the weights, the tensors of each in one allocation."""

    def __init__(self, engine: Engine, spec: CheckpointSpec, device: torch.device, bucket_bytes: int) -> None:
        self._engine, self._device, self._bucket_bytes = engine, device, bucket_bytes
        self._buckets = list(_buckets(random_weights(spec, device), bucket_bytes))
        self._sender: WeightSender | None = None
        self._group: GroupHandle | None = None

    def send(self, way: str, label: str, layers: int | None) -> None:
        """Send one version.  Only what `layers` name is sent, or everything."""
        buckets = [[(name, it) for name, it in bucket if _is_in(name, layers)] for bucket in self._buckets]
        buckets = [bucket for bucket in buckets if bucket]
        begin = {"weight_version": label, "coverage": "full" if layers is None else "partial"}
        {
            "handles": self._by_handles,
            "a handle a tensor": self._by_single_handles,
            "WeightSender": self._by_sender,
            "a broadcast a tensor": self._by_broadcasts,
        }[way](buckets, begin)

    def _by_handles(self, buckets: list[Named], begin: dict[str, Any]) -> None:
        """Send a call a bucket, as slime and verl do.  The pickles are made before anything is timed."""
        if self._device.type == "cpu":  # shared memory of a bucket is sent once
            buckets = [_in_one(bucket) for bucket in buckets]
        payloads = [_pickled(bucket) for bucket in buckets]
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        update_id = uuid.uuid4().hex
        self._engine.begin_weight_update(**begin, update_id=update_id)
        for payload in payloads:
            self._engine.update_weights_from_tensor(payload=payload, update_id=update_id)
        self._engine.end_weight_update(update_id=update_id)

    def _by_single_handles(self, buckets: list[Named], begin: dict[str, Any]) -> None:
        self._by_handles([[named] for bucket in buckets for named in bucket], begin)

    def _by_sender(self, buckets: list[Named], begin: dict[str, Any]) -> None:
        if self._sender is None:
            self._sender = WeightSender(self._engine, timeout_s=TIMEOUT_S)  # has any verb
            self._sender.connect(backend="gloo")
        named = [tensor for bucket in buckets for tensor in bucket]
        self._sender.refresh(named, **begin, bucket_bytes=self._bucket_bytes)

    def _by_broadcasts(self, buckets: list[Named], begin: dict[str, Any]) -> None:
        """Announce a bucket, and broadcast its tensors one by one, as AReaL and OpenRLHF do."""
        group = self._group = self._group or self._join("plain")
        update_id = uuid.uuid4().hex
        self._engine.begin_weight_update(**begin, update_id=update_id)
        for bucket in buckets:
            call = self._engine.start(
                "update_weights_from_distributed",
                names=[name for name, _ in bucket],
                dtypes=[dtype_name(tensor.dtype) for _, tensor in bucket],
                shapes=[list(tensor.shape) for _, tensor in bucket],
                group_name=group.name,
                update_id=update_id,
            )
            for _, tensor in bucket:
                group.finish(group.start_broadcast(tensor.cpu()), time.monotonic() + TIMEOUT_S)
            call.result(TIMEOUT_S)
        self._engine.end_weight_update(update_id=update_id)

    def _join(self, name: str) -> GroupHandle:
        port = free_port()
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        joined = self._engine.start("init_weights_update_group", **place, group_name=name, backend="gloo")
        group = init_process_group("127.0.0.1", port, 0, 2, name, "gloo", TIMEOUT_S)
        joined.result(TIMEOUT_S)
        return group


WAYS = ("handles", "a handle a tensor", "WeightSender", "a broadcast a tensor")


def _is_in(name: str, layers: int | None) -> bool:
    words = name.split(".")
    return layers is None or (words[1] == "layers" and int(words[2]) < layers)


def _pickled(bucket: Named) -> str:
    content = io.BytesIO()
    ForkingPickler(content).dump(bucket)
    return base64.b64encode(content.getvalue()).decode()


def _buckets(tensors: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Named]:
    bucket: Named = []
    nbytes = 0
    for name, tensor in tensors:
        bucket.append((name, tensor))
        nbytes += tensor.nbytes
        if nbytes >= bucket_bytes:
            yield _in_one(bucket)
            bucket, nbytes = [], 0
    if bucket:
        yield _in_one(bucket)


def _in_one(bucket: Named) -> Named:
    flat = torch.cat([tensor.flatten() for _, tensor in bucket])
    parts = flat.split([tensor.numel() for _, tensor in bucket])
    return [(name, part.view(tensor.shape)) for (name, tensor), part in zip(bucket, parts, strict=True)]


def main(words: str, device: str, bucket_bytes: str) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    engine = Engine()
    trainer = Trainer(engine, CheckpointSpec(**json.loads(words)), torch.device(device), int(bucket_bytes))
    engine.say(done=True)
    while (command := engine.commands.get()) is not None:
        trainer.send(**command)
        engine.say(done=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
