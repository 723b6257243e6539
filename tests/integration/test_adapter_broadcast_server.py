"""Adapters by the broadcast of miles, /load_lora_adapter_from_distributed: the ones in force, and refused ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.adapter_broadcast import PATH, AdapterBroadcast
from tests.adapter_updates import FAMILY, SEED, Content, make_content
from tests.family_zoo import family_checkpoint
from tests.server_process import ServerProcess
from tests.troubleshooting import require_entry
from tests.unit.http.test_bad_adapters import WRONG, Sent


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    return [make_content(tmp_path_factory.mktemp(f"c{seed}") / "a", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def server(contents: list[Content], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose two slots are taken by the newest versions of two adapters."""
    folder = family_checkpoint(tmp_path_factory.mktemp("model"), FAMILY, SEED)
    paths = f"poet={contents[0].folder},clerk={contents[1].folder}"
    settings: dict[str, Any] = {"enable_lora": True, "lora_paths": paths, "max_loras_per_batch": 2}
    settings |= {"skip_tokenizer_init": True, "max_total_tokens": 2048, "max_lora_rank": 4}
    settings |= {"served_model_name": "tiny"}
    with ServerProcess(folder, **settings) as running:
        yield running


def served(server: ServerProcess, name: str) -> dict[str, Any]:
    output = server.client.generate(input_ids=[5, 9, 7], sampling_params={"max_new_tokens": 1}, lora_path=name)
    adapter: dict[str, Any] = output.meta_info["adapter"]
    return adapter


def test_an_adapter_of_a_broadcast_is_the_next_version(server: ServerProcess, contents: list[Content]) -> None:
    with AdapterBroadcast(server.http) as trainer:
        for version, content in enumerate(contents, served(server, "poet")["version"] + 1):
            answer = trainer.send("poet", content.config, content.named, upsert=version > 1)
            assert answer.status_code == 200 and answer.json()["error_message"] is None, answer.text
            stated = {"name": "poet", "version": version, "content_digest": content.digest}
            assert served(server, "poet") == stated
            assert stated.items() <= (answer.json() | {"name": answer.json()["lora_name"]}).items()
        body = trainer.body("poet", contents[0].config, contents[0].named)
    left = server.http.post(PATH, json=body)
    assert left.status_code == 404 and body["group_name"] in left.json()["message"]


@pytest.mark.full
@pytest.mark.parametrize("what", [*WRONG, "a name that is served", "added tokens"])
def test_a_refused_adapter_is_received_and_the_next_one_is_not_taken_for_it(
    server: ServerProcess, contents: list[Content], what: str
) -> None:
    """The trainer broadcasts all the same.  Only a body that cannot be read has the server leave the group."""
    before = [served(server, name) for name in ("poet", "clerk")]
    more: dict[str, Any] = {}
    reasons: tuple[str, ...] = ("load_inplace makes this", "added_tokens_config")
    sent = Sent(contents[1].config, contents[1].named)
    if what in WRONG:
        spoil, reasons = WRONG[what]
        sent = spoil(sent)
    else:
        more = {"load_inplace": False} if what == "a name that is served" else {"added_tokens_config": {"a": 1}}
    named = [(name, tensor.to(torch.float32)) for name, tensor in sent.named]
    with AdapterBroadcast(server.http) as trainer:
        answer = trainer.send(sent.name, sent.config, named, **more)
        message = answer.json()["message"]
        assert answer.status_code == 400 and any(reason in message for reason in reasons), answer.text
        require_entry(message)
        assert [served(server, name) for name in ("poet", "clerk")] == before
        if what != "added tokens":
            answer = trainer.send("poet", contents[0].config, contents[0].named)
            assert answer.status_code == 200 and served(server, "poet")["content_digest"] == contents[0].digest
