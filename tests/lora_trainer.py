"""A trainer of two processes that sends the LoRA adapter of a PEFT model under FSDP2.

    python -m tests.lora_trainer SCENARIO[,SCENARIO...] RANK PORT URL FOLDER

Run by `tests.sharded_trainer.run_ranks`.  The server at `URL` serves an adapter `poet`, and PEFT saved another content
of it in `FOLDER`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rollout.adapters.peft_folder import read_adapter
from rollout.client import RolloutClient
from tests.adapter_updates import FAMILY, SEED
from tests.family_zoo import family_model
from tests.sharded_trainer import NUM_RANKS, sender_of
from weight_sync.engine_control import EngineError
from weight_sync.errors import TransportError, WeightRequestError
from weight_sync.sender.lora import base_of, lora_of, packed_lora, ranks_of

PROMPT = [5, 9, 200, 31, 7, 8]
SOON_S = 20.0
"""Far below the deadline of a rank that waits for another."""


def trained(folder: str) -> Any:
    return peft.PeftModel.from_pretrained(family_model(FAMILY, SEED), folder)


def sharded(folder: str) -> Any:
    """Return the trainer's model, each layer and the rest sharded over both ranks, adapters too."""
    model, mesh = trained(folder), dist.init_device_mesh("cpu", (NUM_RANKS,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(tensor, DTensor) for tensor in lora_of(model).tensors.values())
    return model


def served(client: RolloutClient) -> dict[str, Any]:
    output = client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 1}, lora_path="poet")
    return output.meta_info["adapter"]  # type: ignore[no-any-return]


@contextlib.contextmanager
def next_version(rank: int, client: RolloutClient, digest: str | None) -> Iterator[None]:
    """Require that the block brings the next version of the adapter, of this digest; None: that it changes nothing."""
    before = served(client)
    dist.barrier()  # rank 1 has looked, too
    yield
    if rank == 0:
        after = {"name": "poet", "version": before["version"] + 1, "content_digest": digest}
        assert served(client) == (before if digest is None else after), (before, served(client))
        assert not client.weight_update()["open"]
    dist.barrier()


def payload(rank: int, url: str, folder: str) -> None:
    """Pack the sharded adapter: on the first rank it is, byte for byte, what a whole model sends."""
    model = sharded(folder)
    mine = packed_lora(model, "poet", ranks=ranks_of(model))
    assert mine == (packed_lora(trained(folder), "poet") if rank == 0 else None)


def by_sender(rank: int, url: str, folder: str) -> None:
    digest = read_adapter(Path(folder)).digest
    with (
        RolloutClient(url) as client,
        sender_of({"engine": client} if rank == 0 else {}) as sender,
        next_version(rank, client, digest),
    ):
        sender.refresh_adapter("poet", sharded(folder))


def by_client(rank: int, url: str, folder: str) -> None:
    digest = read_adapter(Path(folder)).digest
    with RolloutClient(url) as client, next_version(rank, client, digest), client.adapter_update("poet") as update:
        update.send(sharded(folder))


def failures(rank: int, url: str, folder: str) -> None:
    """Fail on one rank in each way: both ranks raise soon, and the version before serves."""
    model, hurt = sharded(folder), sharded(folder)
    with torch.no_grad():
        for tensor in lora_of(hurt).tensors.values():
            tensor.to_local()[-1:] = float("nan") if rank == 1 else 0.5
    config = hurt.peft_config["default"]
    mine = WeightRequestError if rank == 1 else TransportError

    def lacks_it(update: Any) -> None:
        update.send(model, "default" if rank == 0 else "gone")

    def differs(update: Any) -> None:
        config.lora_alpha = 8 + rank
        update.send(hurt)

    def block_fails(update: Any) -> None:
        update.send(model)
        if rank == 1:
            raise MemoryError("the trainer's own")

    def engine_refuses(update: Any) -> None:
        config.lora_alpha = 8
        update.send(hurt)

    refused = EngineError if rank == 0 else TransportError
    with RolloutClient(url) as client:
        for block, error in (
            (lacks_it, mine),
            (differs, mine),
            (block_fails, MemoryError if rank == 1 else TransportError),
            (engine_refuses, refused),
        ):
            with next_version(rank, client, None):
                raises_soon(error, lambda block=block: in_block(client, block))
        with sender_of({"engine": client} if rank == 0 else {}) as sender, next_version(rank, client, None):
            name = "default" if rank == 0 else "gone"
            raises_soon(mine, lambda: sender.refresh_adapter("poet", model, name))
            raises_soon(refused, lambda: sender.refresh_adapter("poet", hurt))


def both(rank: int, url: str, folder: str) -> None:
    """Send the sharded model and its adapter in one commit; where one rank fails, both raise soon and neither moves."""
    model, hurt, digest = sharded(folder), sharded(folder), read_adapter(Path(folder)).digest
    with torch.no_grad():
        for tensor in lora_of(hurt).tensors.values():
            tensor.to_local()[-1:] = float("nan") if rank == 1 else 0.5
    lacking = sharded(folder)
    lacking.peft_config = {}
    refused = EngineError if rank == 0 else TransportError
    alone = WeightRequestError if rank == 1 else TransportError
    with RolloutClient(url) as client, sender_of({"engine": client} if rank == 0 else {}) as sender:
        label = client.weight_version()
        for source in (model, base_of(trained(folder))):  # the second is not sharded, unlike the adapter
            adapters = {"poet": model if rank == 0 else lacking}
            with next_version(rank, client, None):
                raises_soon(alone, lambda source=source, adapters=adapters: sender.refresh(source, adapters=adapters))
        assert client.weight_version() == label
        with next_version(rank, client, digest):
            sender.refresh(model, "of both ranks", adapters={"poet": model})
        with next_version(rank, client, None):
            raises_soon(refused, lambda: sender.refresh(model, "hurt", adapters={"poet": hurt}))
        assert client.weight_version() == "of both ranks"


def in_block(client: RolloutClient, block: Any) -> None:
    with client.adapter_update("poet") as update:
        block(update)


def raises_soon(error: type[BaseException], call: Any) -> None:
    start = time.monotonic()
    try:
        call()
    except error:
        assert time.monotonic() - start < SOON_S
    else:
        raise AssertionError(f"no {error.__name__} was raised")


SCENARIOS = {function.__name__: function for function in (payload, by_sender, by_client, failures, both)}


def main(scenarios: str, rank: str, port: str, *words: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), NUM_RANKS, rank == "0")
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=NUM_RANKS)
    for scenario in scenarios.split(","):
        SCENARIOS[scenario](int(rank), *words)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
