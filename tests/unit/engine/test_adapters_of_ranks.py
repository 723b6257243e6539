"""Adapters that ranks read at start must be one content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.distributed.communicator import Communicator
from rollout.engine.adapters import load_adapters
from tests.adapters import write_adapter
from tests.model_zoo import load_tiny, tiny_checkpoint


def test_ranks_that_read_other_contents_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_tiny(tiny_checkpoint(tmp_path / "model"))
    name, layer = next((name, each) for name, each in model.named_layers() if name.endswith("self_attn.o_proj"))
    matrices = torch.ones(2, layer.in_features), torch.ones(layer.out_features, 2)  # type: ignore[attr-defined]
    folder = write_adapter(tmp_path / "a", {name: matrices}, 0.5)
    args = ServerArgs(enable_lora=True, lora_paths=f"a={folder}")

    def alike(_: Communicator, mine: Sequence[int]) -> list[list[int]]:
        return [list(mine), list(mine)]

    def apart(_: Communicator, mine: Sequence[int]) -> list[list[int]]:
        return [list(mine), [mine[0] ^ (len(mine) > 1), *mine[1:]]]  # each votes that it can, and has its own content

    monkeypatch.setattr(Communicator, "gather_ints", alike)
    assert [label.name for label in load_adapters(args, model).labels] == ["a"]
    monkeypatch.setattr(Communicator, "gather_ints", apart)
    with pytest.raises(StartupError, match=r"--lora-paths a=.*: the ranks read other contents"):
        load_adapters(args, model)
