"""A PEFT model's adapter from the trainer's side to a served version: the client's block, and the sender."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lockstep_rl import WeightSender
from rollout.adapters.peft_folder import read_adapter
from rollout.client import AsyncRolloutClient, RolloutClient
from rollout.core.errors import BadRequest
from tests.adapter_updates import FAMILY, SEED, Content, make_content
from tests.engine_thread import EngineThread
from tests.family_zoo import family_checkpoint, family_model
from tests.http_harness import Live, live_server
from tests.sharded_trainer import run_ranks
from tests.troubleshooting import require_entry
from weight_sync.engine_control import EngineError
from weight_sync.errors import WeightRequestError
from weight_sync.sender.lora import base_of, lora_of, packed_lora, ranks_of, with_adapters
from weight_sync.sender.refresh import Refresh

PROMPT = [5, 9, 200, 31, 7, 8]


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    settings: dict[str, Any] = {"rank_pattern": {"q_proj": 3}}
    return [make_content(tmp_path_factory.mktemp(f"c{seed}") / "a", seed, **settings) for seed in range(3)]


@pytest.fixture(scope="module")
def server(contents: list[Content], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = family_checkpoint(tmp_path_factory.mktemp("model"), FAMILY, SEED)
    settings: dict[str, Any] = {"enable_lora": True, "lora_paths": f"poet={contents[0].folder}"}
    settings |= {"skip_tokenizer_init": True, "max_total_tokens": 1024, "max_lora_rank": 8}
    with live_server(folder, with_tokenizer=False, engine=EngineThread, **settings) as live:
        yield live


def trained(content: Content, name: str = "default") -> Any:
    """Return the model of a trainer, whose adapter has this content."""
    return peft.PeftModel.from_pretrained(family_model(FAMILY, SEED), content.folder, adapter_name=name)


def adapter_of(client: RolloutClient) -> dict[str, Any]:
    output = client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 1}, lora_path="poet")
    return output.meta_info["adapter"]  # type: ignore[no-any-return]


def test_the_clients_block_brings_the_next_version(server: Live, contents: list[Content]) -> None:
    with RolloutClient(server.url) as client:
        version = adapter_of(client)["version"]
        with client.adapter_update("poet") as update:
            update.send(trained(contents[1]))
            assert adapter_of(client)["version"] == version, "in force at the end of the block"
        assert adapter_of(client) == label(contents[1], version + 1)
        assert all(engine.committed for engine in update.engines.values())
    assert client_version(server) == "default", "the model is as it was"


def test_the_sender_refreshes_the_target_with_the_adapters_tensors(
    contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(WeightSender, "refresh", lambda self, *given, **options: calls.append((given, options)))
    more: dict[str, Any] = {"begin_options": {"base_version": "v0"}, "bucket_bytes": 7}
    WeightSender({}).refresh_adapter("poet", trained(contents[2], "other"), "other", **more)
    (((tensors,), options),) = calls
    sent = dict(contents[2].named)
    assert tensors.keys() == sent.keys() and all(torch.equal(tensors[name], sent[name]) for name in sent)
    target = {"adapter": "poet", "config": lora_of(trained(contents[2])).config}
    assert options == {"begin_options": {"target": target, "base_version": "v0"}, "bucket_bytes": 7}


def client_version(server: Live) -> str:
    with RolloutClient(server.url) as client:
        return client.weight_version()


def label(content: Content, version: int) -> dict[str, Any]:
    return {"name": "poet", "version": version, "content_digest": read_adapter(content.folder).digest}


async def by_the_async_client(url: str, content: Content) -> None:
    async with AsyncRolloutClient(url) as client, client.adapter_update("poet") as update:
        await update.send(trained(content))


def test_the_async_client_brings_the_next_version(server: Live, contents: list[Content]) -> None:
    with RolloutClient(server.url) as client:
        version = adapter_of(client)["version"]
        asyncio.run(by_the_async_client(server.url, contents[2]))
        assert adapter_of(client) == label(contents[2], version + 1)


def test_an_error_in_the_block_or_of_the_server_leaves_the_version(server: Live, contents: list[Content]) -> None:
    with RolloutClient(server.url) as client:
        before, model = adapter_of(client), trained(contents[1])
        with pytest.raises(RuntimeError, match="the trainer's"), client.adapter_update("poet") as update:
            update.send(model)
            raise RuntimeError("the trainer's own error")
        with torch.no_grad():
            next(tensor for name, tensor in model.named_parameters() if ".lora_A" in name)[0, 0] = float("nan")
        with pytest.raises(EngineError, match="not finite"), client.adapter_update("poet") as update:
            update.send(model)
        for refused in (lambda each: None, lambda each: [each.send(trained(contents[1])) for _ in range(2)]):
            with pytest.raises(BadRequest) as caught, client.adapter_update("poet") as update:
                refused(update)
            require_entry(str(caught.value))
        assert adapter_of(client) == before and client.weight_update()["open"] is False


@pytest.mark.parametrize("adapter", ["default", "gone"])
def test_a_model_without_the_adapter_is_refused(adapter: str, contents: list[Content]) -> None:
    model = family_model(FAMILY, SEED) if adapter == "default" else trained(contents[0])
    with pytest.raises(WeightRequestError, match=f"the model has no adapter '{adapter}' of PEFT") as caught:
        lora_of(model, adapter)
    require_entry(str(caught.value))


def test_tensors_that_no_engine_serves_are_sent_to_be_refused() -> None:
    """A magnitude of DoRA, or an embedding, is not left out in silence."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], use_dora=True)
    names = lora_of(peft.get_peft_model(family_model(FAMILY, SEED), config)).tensors
    for part in ("lora_magnitude_vector", "lora_embedding_A", "lora_A.weight"):
        assert any(part in name for name in names), part
    assert not any("default" in name for name in names)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sharded_model_sends_what_a_whole_one_does(one_rank: None, contents: list[Content]) -> None:
    whole, sharded = trained(contents[1]), trained(contents[1])
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
    assert all(isinstance(tensor, DTensor) for tensor in lora_of(sharded).tensors.values())
    mine, theirs = packed_lora(sharded, "poet", ranks=ranks_of(sharded)), packed_lora(whole, "poet")
    assert mine is not None and theirs is not None
    assert (mine.target, mine.manifest) == (theirs.target, theirs.manifest)
    ours = load(theirs.payload)
    assert all(torch.equal(tensor, ours[name]) for name, tensor in load(mine.payload).items())


def test_a_model_sharded_over_two_processes_is_one_version_or_none(server: Live, contents: list[Content]) -> None:
    scenarios = "payload,by_sender,by_client,failures,both"
    run_ranks(scenarios, server.url, str(contents[1].folder), module="tests.lora_trainer", within_s=240.0)


def test_a_folder_is_what_peft_would_save(contents: list[Content], tmp_path: Path) -> None:
    lora = lora_of(trained(contents[1]))
    assert {name: tensor.shape for name, tensor in lora.tensors.items()} == {
        name: tensor.shape for name, tensor in contents[1].named
    }
    assert lora.config["target_modules"] == sorted(contents[1].config["target_modules"])


def test_the_base_of_a_peft_model_has_the_names_that_it_had(contents: list[Content]) -> None:
    base, plain = base_of(trained(contents[1])), family_model(FAMILY, SEED).state_dict()
    assert base.keys() == plain.keys() and all(torch.equal(tensor, plain[name]) for name, tensor in base.items())


def test_a_sender_sends_a_model_and_its_adapters_together(
    contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = trained(contents[1], "poet"), list[Refresh]()
    monkeypatch.setattr(WeightSender, "_require_role", lambda *_: None)
    monkeypatch.setattr(WeightSender, "_attempt", lambda self, refresh, progress: seen.append(refresh) or True)
    report = WeightSender({}).refresh(model, "both", adapters={"poet": model}, begin_options={"lease_s": 5.0})
    (refresh,) = seen
    sent, base = refresh.plan.contents.lists.names, family_model(FAMILY, SEED).state_dict()
    assert set(dict(contents[1].named)) == {name for name in sent if ".lora_" in name}
    assert {name for name in sent if ".lora_" not in name} <= base.keys()
    config = lora_of(model, "poet").config
    assert refresh.fields["adapters"] == [{"adapter": "poet", "config": config}] and refresh.fields["lease_s"] == 5.0
    refresh.prepare()
    assert len(refresh.report().fingerprints) == len(sent) and refresh.report().digest is report.digest is None
    with pytest.raises(WeightRequestError, match="a sender per rank sends no adapters") as caught:
        WeightSender({}, per_rank=True).refresh(model, adapters={"poet": model})
    require_entry(str(caught.value))


def test_a_server_takes_a_model_and_two_adapters_of_it(server: Live, contents: list[Content]) -> None:
    """Last, as the model has another version then."""
    model = trained(contents[1], "poet")
    model.load_adapter(contents[2].folder, "clerk")
    tensors, targets = with_adapters(model, {"poet": model, "clerk": model})
    payload = save({name: tensor.clone() for name, tensor in dict(tensors).items()})
    with RolloutClient(server.url) as client:
        version = adapter_of(client)["version"]
        with client.weight_transaction("both", adapters=targets) as update:
            update.send("update_weights_from_tensor", serialized_named_tensors=[payload], format="safetensors")
            assert adapter_of(client)["version"] == version
        assert (client.weight_version(), adapter_of(client)) == ("both", label(contents[1], version + 1))
        clerk = client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 1}, lora_path="clerk")
        assert clerk.meta_info["adapter"]["content_digest"] == read_adapter(contents[2].folder).digest
