"""A `WeightSender` that sends each rank of a server what it keeps: bytes, bits, moved experts, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.client.errors import ServerError
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess
from tests.sharded_trainer import run_ranks
from weight_sync.errors import TransactionStateError, WeightRequestError
from weight_sync.process_group import GroupHandle
from weight_sync.sender import WeightSender

EP2 = {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 4, "enable_eplb": True}
EP2_TP2 = {"tp_size": 4, "ep_size": 2}


class Noting:
    """Passes control calls on, and notes their names.  `before(name)` is called first."""

    def __init__(self, control: Any) -> None:
        self._control = control
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda name: None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._control, name)
        if not callable(found):
            return found

        def call(**fields: Any) -> Any:
            self.before(name)
            self.calls.append(name)
            return found(**fields)

        return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the bytes that this process sends, by group."""
    counts: Counter[str] = Counter()
    start = GroupHandle.start_broadcast

    def counted(self: GroupHandle, tensor: torch.Tensor, timeout_s: float | None = None) -> Any:
        counts[self.name] += tensor.nbytes
        return start(self, tensor, timeout_s)

    monkeypatch.setattr(GroupHandle, "start_broadcast", counted)
    yield counts


def serve(folder: Path, **settings: Any) -> ServerProcess:
    return ServerProcess(folder, dtype="float32", max_total_tokens=2048, num_threads=1, **settings)


def new_tensors(folder: Path, factor: float) -> dict[str, torch.Tensor]:
    return {name: tensor.float() * factor for name, tensor in logical_tensors(folder).items()}


def serves(server: ServerProcess, report: Any) -> bool:
    """Return whether all places of all ranks have what was sent: their shares sum up to its fingerprints."""
    return dict(server.client.weights_checker("checksum")["checksums"]) == report.fingerprints


def move_experts(server: ServerProcess) -> int:
    """Exchange the experts of the two ranks; return the placement epoch after it."""
    located = server.http.get("/expert_location").json()["physical_to_logical_map"]
    half = len(located[0]) // 2
    moved = server.http.post(
        "/eplb_rebalance", json={"physical_to_logical_map": [row[half:] + row[:half] for row in located]}
    )
    assert moved.status_code == 200 and moved.json()["rebalanced"], moved.text
    return int(moved.json()["placement_epoch"])


@pytest.mark.parametrize("settings", [EP2, pytest.param(EP2_TP2, marks=pytest.mark.full)], ids=["ep2", "ep2_tp2"])
def test_each_rank_receives_what_it_keeps(folder: Path, sent: Counter[str], settings: dict[str, Any]) -> None:
    """Experts move between two refreshes, and in the midst of one: it is planned anew, once, and all bits are right."""
    with serve(folder, **settings) as server:
        control = Noting(server.client)
        sender = WeightSender(control, timeout_s=30.0, per_rank=True)
        sender.connect(group_name="pairs")
        first = sender.refresh(new_tensors(folder, 1.25), "v1", bucket_bytes=1 << 17)
        assert serves(server, first) and first.engines["engine"].committed
        per_rank = dict(sent)
        assert len(per_rank) == settings["tp_size"] and sum(per_rank.values()) == first.engines["engine"].num_bytes
        print(f"{first.num_bytes} bytes in all; {per_rank}")
        assert max(per_rank.values()) < 0.75 * first.num_bytes
        sent.clear()
        again = sender.refresh(new_tensors(folder, 1.5), "v2", bucket_bytes=1 << 17)
        assert serves(server, again) and dict(sent) == per_rank
        assert control.calls.count("weight_parts") == 1
        if "enable_eplb" in settings:
            epoch = move_experts(server)
            assert serves(server, sender.refresh(new_tensors(folder, 1.75), "v3"))
            assert control.calls.count("weight_parts") == 2
            assert server.http.get("/expert_location").json()["placement_epoch"] == epoch
            sender.close()
            moving_away(folder, server)
        sender.close()
        whole = WeightSender(server.client, timeout_s=30.0, transport="broadcast")
        whole.connect(group_name="whole")
        assert serves(server, whole.refresh(new_tensors(folder, 2.0), "v4"))
        assert sent["whole"] == first.num_bytes
        whole.close()


def moving_away(folder: Path, server: ServerProcess) -> None:
    """Move experts whenever the sender has asked: it gives up after the second time, and changes nothing."""
    control = Noting(server.client)
    control.before = lambda name: move_experts(server) and None if name == "begin_weight_update" else None
    sender = WeightSender(control, timeout_s=30.0, per_rank=True)
    sender.connect(group_name="moving")
    before = server.client.weights_checker("checksum")["checksums"]
    with pytest.raises(TransactionStateError, match="experts moved on engine"):
        sender.refresh(new_tensors(folder, 3.0), "v9")
    assert control.calls.count("begin_weight_update") == 2
    assert server.client.weights_checker("checksum")["checksums"] == before
    control.before = lambda name: None
    assert serves(server, sender.refresh(new_tensors(folder, 3.0), "v9"))
    sender.close()
    with pytest.raises(ServerError, match="placement epoch"):
        server.client.begin_weight_update("v10", per_rank=True, placement_epoch=0)
    with pytest.raises(ServerError, match="per_rank needs placement_epoch"):
        server.client.begin_weight_update("v10", per_rank=True)
    with pytest.raises(ServerError, match="rank_ports has 1 ports, and the engine has 2 ranks"):
        server.client.init_weights_update_group("127.0.0.1", 1, 1, 2, "none", rank_ports=[1])


@pytest.mark.full
def test_shards_of_two_trainer_ranks_go_to_the_ranks_that_keep_them(folder: Path) -> None:
    with serve(folder, **EP2) as server:
        run_ranks("serve_per_rank", str(folder), server.url)


@pytest.mark.full
def test_engines_of_one_and_of_two_ranks_together_and_one_that_is_killed(folder: Path) -> None:
    with serve(folder) as alone, serve(folder, **EP2) as pair:
        servers = {"alone": alone, "pair": pair}
        controls = {name: server.client for name, server in servers.items()}
        sender = WeightSender(controls, timeout_s=20.0, on_engine_failure="leave_out", per_rank=True)
        sender.connect()
        report = sender.refresh(new_tensors(folder, 1.25), "v1", bucket_bytes=1 << 16)
        assert report.left_out == [] and all(serves(server, report) for server in servers.values())
        assert report.engines["alone"].num_bytes == report.num_bytes < report.engines["pair"].num_bytes
        alone.process.kill()
        report = sender.refresh(new_tensors(folder, 1.5), "v2", bucket_bytes=1 << 16)
        assert report.left_out == ["alone"] and serves(pair, report)
        assert sender.connected == ["pair"], "nothing is left of the group with an engine that gives no answer"
        with pytest.raises(WeightRequestError, match="use refresh"):
            sender.update("v3")
        sender.close()
        with pytest.raises(WeightRequestError, match="leave out shared"):
            sender.connect(shared=True)
