"""The lines of a recording that concern adapters: how a client sends one, and what serves then.

    {"adapter": 1, "by": "body" or "broadcast", "checksums": true, "joins": call, "sends": call}
    {"adapter": 1, "by": ..., "as": name, "classes": module, "joins": call, "sends": call, "ends": call}
    {"serves": 1, "as": name}

The number is the seed of a random adapter of the checkpoint.  `joins`: the call that makes the group of a broadcast.
`as`: the tensors come in a weight update, by names `name`:TENSOR.  `classes`: in a bucket of the class of this module.
`ends`: the call that ends the update, with the checksums of what came if `checksums` is true.
"""

from __future__ import annotations

import base64
import hashlib
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from tests.adapter_updates import Content, random_content
from tests.faults.transports import Named
from tests.parameter_server_stand_in import file_system_sharing
from tests.sglang_payloads import classes_in, flattened, forking_pickle
from weight_sync.process_group import GroupHandle, init_process_group

if TYPE_CHECKING:
    from tests.replay import Replay

JOIN_S = 30.0


def content_of(replay: Replay, seed: int) -> Content:
    """Return the adapter of this seed."""
    folder = replay.folder / f"adapter-{seed}"
    return Content(folder) if folder.exists() else random_content(folder, replay.tensors, seed)


def send_adapter(replay: Replay, line: dict[str, Any]) -> None:
    """Play a line `adapter`."""
    content = content_of(replay, line["adapter"])
    named = [(f"{line['as']}:{name}", tensor) for name, tensor in content.named] if "as" in line else content.named
    {"body": _in_body, "broadcast": _by_broadcast}[line["by"]](replay, line, named)
    if "ends" in line:
        stated = {name: _sha256(tensor) for name, tensor in content.named}
        more = {"expected_lora_checksums": {line["as"]: stated}} if line.get("checksums") else {}
        replay.call(line["ends"], **more)


def _in_body(replay: Replay, line: dict[str, Any], named: Named) -> None:
    """Send the tensors by their names, pickled once for the one rank."""
    more: dict[str, Any] = {}
    if line.get("checksums") and "as" not in line:
        more["expected_checksums"] = {name: _sha256(tensor) for name, tensor in named}
    with file_system_sharing(), classes_in(line["classes"]) if "classes" in line else nullcontext():
        content = flattened(named) if "classes" in line else dict(named)
        payload = base64.b64encode(forking_pickle(content)).decode()
    replay.call(line["sends"], serialized_named_tensors=[payload], **more)


def _by_broadcast(replay: Replay, line: dict[str, Any], named: Named) -> None:
    """Announce the tensors, and broadcast one after the other."""
    group = _group(replay, line)
    announced = {
        "names": [name for name, _ in named],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
    }
    told = replay.pool.submit(replay.call, line["sends"], **announced)
    for _, tensor in named:
        group.finish(group.start_broadcast(tensor.contiguous()), time.monotonic() + JOIN_S)
    told.result(60)
    group.destroy()


def _group(replay: Replay, line: dict[str, Any]) -> GroupHandle:
    told = replay.pool.submit(replay.call, line["joins"])
    port, name = int(replay.names["$PORT"]), str(replay.names["$GROUP"])
    group = init_process_group("127.0.0.1", port, 0, 2, name, "gloo", JOIN_S)
    told.result(60)
    return group


def assert_serves(replay: Replay, line: dict[str, Any]) -> None:
    """Play a line `serves`: a request that names the adapter gets this content."""
    params = {"max_new_tokens": 2, "ignore_eos": True}
    output = replay.server.client.generate(input_ids=[5, 9, 7], sampling_params=params, lora_path=line["as"])
    assert output.meta_info["adapter"]["content_digest"] == content_of(replay, line["serves"]).digest


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
