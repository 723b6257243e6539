"""A trainer of four processes: a mixture-of-experts model under FSDP2 and tensor parallelism, [dp 2, tp 2].

    python -m tests.fsdp_tp_trainer SCENARIO[,SCENARIO...] RANK PORT

Run by `tests.sharded_trainer.run_ranks`.  Every content is compared with torch's own `full_tensor()`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from tests.gathered import Gathered
from tests.logical_weights_fake import bits
from tests.sharded_trainer import TIMEOUT_S, sender_of
from tests.weight_engine_process import Engine
from weight_sync.errors import WeightRequestError
from weight_sync.fingerprint import fingerprint
from weight_sync.sender import shards
from weight_sync.sender.plan import TensorPlan, plan_tensors
from weight_sync.sender.ranks import TrainerRanks

NUM_RANKS = 4
HIDDEN, INNER, VOCAB, EXPERTS = 8, 10, 13, 5  # tp splits 13 rows as 7 and 6, dp 7 as 4 and 3; 5 experts as 3 and 2


class Attention(torch.nn.Module):
    """The products of attention, without it."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(HIDDEN, INNER)
        self.o_proj = torch.nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.o_proj(self.q_proj(x))
        return projected


class Experts(torch.nn.Module):
    """Fused experts; each rank of tp has whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, 6, HIDDEN))
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held: tuple[Any, Any] = self.gate_up_proj, self.down_proj
        (gate_up, down), mesh = (it.to_local() for it in held), held[0].device_mesh
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        gate, up = (x @ gate_up.mT).chunk(2, -1)
        of_mine = ((gate * up) @ down.mT).sum(0, keepdim=True)
        return DTensor.from_local(of_mine, mesh, [Partial()], run_check=False).full_tensor()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.mlp = torch.nn.ModuleDict({"gate": torch.nn.Linear(HIDDEN, EXPERTS), "experts": Experts()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        output: torch.Tensor = x + self.mlp["experts"](x) * self.mlp["gate"](x).mean()
        return output


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(VOCAB, HIDDEN)
        self.layers = torch.nn.ModuleList([Layer()])
        self.lm_head = torch.nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.layers[0](self.embed_tokens(ids)))
        return logits


def parameters_of(model: Model) -> list[DTensor]:
    """Return the parameters, which are all sharded."""
    return list(model.parameters())  # type: ignore[arg-type]


def parallel_model(mesh: DeviceMesh) -> Model:
    """Return a model as FSDP2 and tensor parallelism leave it; norm and gate are on dp only."""
    torch.manual_seed(0)
    model = Model()
    parallelize_module(
        model,
        mesh["tp"],
        {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "layers.0.attention.q_proj": ColwiseParallel(),
            "layers.0.attention.o_proj": RowwiseParallel(),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    layer: Any = model.layers[0]
    experts = layer.mlp["experts"]
    for name, parameter in list(experts.named_parameters()):
        experts.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter, mesh["tp"], [Shard(0)])))
    fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    kinds = {type(placement) for it in parameters_of(model) for placement in it.placements}
    assert kinds == {Shard, _StridedShard, Replicate}, kinds
    return model


def train(model: Model) -> None:
    """Take a step that changes every tensor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.to_local().clone() for parameter in parameters_of(model)]
    model(torch.arange(VOCAB)[None]).square().mean().backward()
    optimizer.step()
    for parameter, old in zip(parameters_of(model), before, strict=True):
        assert not old.numel() or not torch.equal(parameter.to_local(), old), parameter.shape


def whole_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what is sent of the whole tensors, by name."""
    gathered = {name: it.full_tensor() if isinstance(it, DTensor) else it for name, it in tensors.items()}
    return contents_of(plan_tensors(gathered))


def contents_of(plan: TensorPlan) -> dict[str, torch.Tensor]:
    return {name: part.piece.of(plan.sources[part.source]) for name, part in plan.parts.items()}


def refresh_and_train(rank: int) -> None:
    """Send, train, and send again by the same plan: the engine has the bits of the whole tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel_model(mesh)
    metas = plan_tensors(whole_of(model.state_dict())).metas
    with contextlib.ExitStack() as stack:
        engines = {"engine": Engine(TIMEOUT_S, metas=metas)} if rank == 0 else {}
        for engine in engines.values():
            stack.callback(engine.close)
        sender = stack.enter_context(sender_of(engines))
        for turn in range(3):
            report = sender.refresh(model, f"v{turn}", bucket_bytes=300)
            whole = whole_of(model.state_dict())
            assert report.num_buckets > 5
            assert report.fingerprints == {name: f"{fingerprint(tensor):016x}" for name, tensor in whole.items()}
            for engine in engines.values():
                assert engine.call("content") == [bits(tensor).hex() for tensor in whole.values()]
                assert engine.call("content_digest") == report.digest
            assert len(sender._plans._plans) == 1
            train(model)
        with patch("weight_sync.sender.meshes._alike", lambda mesh: iter([mesh.mesh.flatten().tolist()])):
            try:  # each rank thinks that the ranks of its own mesh send
                sender.refresh(model, "v9", bucket_bytes=301)
            except WeightRequestError as error:
                assert "placement of layers.0.norm.weight is Shard(0) over ranks [0, 2] on rank 0" in str(error), error
            else:
                raise AssertionError("two ranks sent one shard")


def are_gathered(rank: int, tensors: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the bytes and fingerprints of sharded tensors equal the whole ones'."""
    plan = plan_tensors(tensors)
    gathered = Gathered(plan, TrainerRanks(None, "cpu", TIMEOUT_S))
    found = gathered.fingerprints()
    flat = torch.zeros(sum(meta.nbytes for meta in plan.metas), dtype=torch.uint8)
    pieces = gathered.gather(0, flat if rank == 0 else None)
    is_right = found == {name: fingerprint(tensor) for name, tensor in whole.items()}
    if rank == 0:
        is_right &= b"".join(map(bits, pieces)) == b"".join(map(bits, whole.values()))
    return is_right


def other_meshes(rank: int) -> None:
    """Gather from meshes that replicate, of three dimensions, and of one."""
    for shape, names in (((2, 2), ("replicate", "shard")), ((2, 1, 2), ("replicate", "shard", "tp"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 6))
        if "tp" in names:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["replicate", "shard"])
        assert are_gathered(rank, model.state_dict(), whole_of(model.state_dict())), shape
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    tensor = DTensor.from_local(torch.ones(2, 2), mesh, [_StridedShard(0, split_factor=3)], run_check=False)
    try:
        Gathered(plan_tensors([("w", tensor)]), TrainerRanks(None, "cpu", TIMEOUT_S))
    except WeightRequestError as error:
        assert "w: placement _StridedShard(dim=0, sf=3) cannot be sent" in str(error), str(error)
    else:
        raise AssertionError("a tensor was taken that is strided by no mesh dimension")


_right_order = shards._order_of_cuts


def _swapped(name: str, placements: list[Shard], sizes: list[int]) -> list[tuple[int, int]]:
    return _right_order(name, placements, sizes)[::-1]


def _by_mesh(name: str, placements: list[Shard], sizes: list[int]) -> list[tuple[int, int]]:
    """Ignore the stride."""
    return sorted(_right_order(name, placements, sizes), key=lambda cut: cut[1])


WRONG = {"the two splits exchanged": _swapped, "a stride ignored": _by_mesh}


def wrong_variants(rank: int) -> None:
    """Require that each wrong reading of placements sends something else than the whole tensors, where sizes divide."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    whole = whole_of(model.state_dict())
    assert are_gathered(rank, model.state_dict(), whole)
    for wrong, order in WRONG.items():
        with patch.object(shards, "_order_of_cuts", order):
            assert not are_gathered(rank, model.state_dict(), whole), wrong


SCENARIOS = (refresh_and_train, other_meshes, wrong_variants)


def main(scenarios: str, rank: str, port: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), NUM_RANKS, rank == "0")
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=NUM_RANKS)
    for scenario in scenarios.split(","):
        {function.__name__: function for function in SCENARIOS}[scenario](int(rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
