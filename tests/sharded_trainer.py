"""A trainer of two processes, each a rank of a gloo group, that sends tensors that are sharded over both.

    python -m tests.sharded_trainer SCENARIO[,SCENARIO...] RANK PORT [WORD...]

A scenario is a function of this file; it asserts for itself and prints nothing.  `run_ranks` is the other end: it
starts the ranks, gives them a deadline, and fails with their output.  Rank 0 starts the engine processes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rollout.client import RolloutClient
from tests.gathered import Gathered
from tests.logical_weights_fake import DOWN, EMBED, GATE_UP, NORM, fused, version
from tests.model_zoo import logical_tensors
from tests.weight_engine_process import Engine
from tests.weight_group_helpers import content_of
from weight_sync.bucket import plan_buckets
from weight_sync.errors import TransportError, WeightRequestError
from weight_sync.fingerprint import fingerprint
from weight_sync.process_group import free_port
from weight_sync.sender import EngineError, WeightSender, named_tensors_of
from weight_sync.sender.gather import Gatherer
from weight_sync.sender.layout import SharedBucket
from weight_sync.sender.plan import plan_tensors
from weight_sync.sender.ranks import TrainerRanks
from weight_sync.tensor_meta import DTYPES

NUM_RANKS = 2
TIMEOUT_S = 20.0


def run_ranks(
    scenarios: str,
    *words: str,
    within_s: float = 120.0,
    exits: tuple[int, ...] = (0, 0),
    module: str = "tests.sharded_trainer",
) -> None:
    """Run scenarios of a module on all ranks, one after the other; `exits` are the exit statuses to expect, by rank."""
    port = str(free_port())
    command = [sys.executable, "-m", module, scenarios]
    processes = [
        subprocess.Popen(
            [*command, str(rank), port, *words],
            cwd=Path(__file__).parents[1],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(len(exits))
    ]
    deadline = time.monotonic() + within_s
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=max(deadline - time.monotonic(), 1.0))[0])
    finally:
        for process in processes:
            process.kill()
    assert tuple(process.returncode for process in processes) == exits, "\n---\n".join(said)


# --- models ------------------------------------------------------------------------------------------------------


class Experts(torch.nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(tensors[GATE_UP].clone())
        self.down_proj = torch.nn.Parameter(tensors[DOWN].clone())


class Holder(torch.nn.Module):
    def __init__(self, **children: torch.nn.Module | torch.Tensor) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, torch.nn.Parameter(child.clone()) if isinstance(child, torch.Tensor) else child)


def fsdp_model(seed: int, mesh: DeviceMesh, shard_dim: int = 0) -> torch.nn.Module:
    """Build the test model with the names of `logical_weights_fake`, three experts sharded module by module."""
    tensors = fused(version(seed))
    layer = Holder(mlp=Holder(experts=Experts(tensors)))
    model = Holder(
        model=Holder(
            embed_tokens=Holder(weight=tensors[EMBED]),
            norm=Holder(weight=tensors[NORM]),
            layers=torch.nn.ModuleList([layer]),
        )
    )
    placement = lambda parameter: Shard(shard_dim % parameter.dim())  # noqa: E731
    for module in (layer, model.get_submodule("model.norm"), model.get_submodule("model.embed_tokens")):
        fully_shard(module, mesh=mesh, shard_placement_fn=placement)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def sharded(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """Shard as `distribute_tensor` does, without collectives: gloo does not know every dtype."""
    local = whole
    for placement, at, parts in zip(placements, mesh.get_coordinate() or (), mesh.mesh.shape):
        if isinstance(placement, Shard):
            chunks = local.chunk(parts, placement.dim)
            local = chunks[at] if at < len(chunks) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


@contextmanager
def sender_of(engines: dict[str, Any], **options: Any) -> Iterator[WeightSender]:
    sender = WeightSender(engines, timeout_s=TIMEOUT_S, **options)
    if engines:
        sender.connect()
    try:
        yield sender
    finally:
        sender.close()


@contextmanager
def engines_of(rank: int, count: int) -> Iterator[dict[str, Engine]]:
    engines = {f"engine{i}": Engine(TIMEOUT_S) for i in range(count)} if rank == 0 else {}
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


# --- scenarios ---------------------------------------------------------------------------------------------------


def random_gathers(rank: int) -> None:
    """Gather random mixes of dtypes, shapes, meshes and placements: bytes and fingerprints equal the whole tensors'."""
    meshes = [init_device_mesh("cpu", shape) for shape in ((2,), (1, 2), (2, 1))]
    dtypes = [dtype for name, dtype in DTYPES.items() if "float8" not in name and dtype is not torch.bool]
    for seed in range(25):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        whole: dict[str, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        for i in range(rng.randint(1, 6)):
            shape = tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 3)))
            name = f"w{i}"
            if rng.random() < 0.3:
                shape, name = (rng.randint(1, 5), 2 * rng.randint(1, 3), 3), f"layers.{i}.experts.gate_up_proj"
            of_layer = {name: shape}
            if rng.random() < 0.3:
                experts, hidden, inner = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 4)
                of_layer = {
                    f"layers.{i}.experts.gate_up_proj": (experts, hidden, 2 * inner),
                    f"layers.{i}.experts.gate_up_proj_bias": (experts, 2 * inner),
                    f"layers.{i}.experts.down_proj": (experts, inner, hidden),
                }
            for name, shape in of_layer.items():
                whole[name] = (torch.randn(shape) * 50).to(rng.choice(dtypes))
                mesh = rng.choice(meshes)
                choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
                placements = [rng.choice(choices) for _ in range(mesh.ndim)]
                is_plain = rng.random() < 0.15
                tensors[name] = whole[name] if is_plain else sharded(whole[name], mesh, placements)
        tensors["sharded"] = sharded(torch.arange(5), meshes[0], [Shard(0)])
        whole["sharded"] = torch.arange(5)
        cast = rng.choice([None, torch.bfloat16])
        plan, expected = plan_tensors(list(tensors.items()), cast), plan_tensors(list(whole.items()), cast)
        assert [*plan.parts] == [*expected.parts]
        buckets = plan_buckets(plan.metas, rng.choice([1, 100, 10**6]))
        gathered = Gathered(plan, TrainerRanks(None, "cpu", TIMEOUT_S), buckets)
        found = gathered.fingerprints()
        reference = Gathered(expected, None, buckets)
        values = reference.fingerprints()
        assert found.items() <= values.items()
        assert found == values, seed
        for number, bucket in enumerate(buckets):
            size = sum(meta.nbytes for meta in bucket)
            flat, there = torch.full((size,), 7, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
            pieces = gathered.gather(number, flat if rank == 0 else None)
            wanted = reference.gather(number, there)
            assert rank or torch.equal(torch.cat(pieces), torch.cat(wanted)), (seed, [meta.name for meta in bucket])
            assert rank == 0 or pieces == []


def refusals(rank: int) -> None:
    """Require that both ranks refuse what cannot be sent, and that neither waits for the other."""
    mesh = init_device_mesh("cpu", (2,))
    rows = sharded(torch.randn(4, 4), mesh, [Shard(0)])
    start = time.monotonic()
    with sender_of({}) as sender:
        cases: list[tuple[list[tuple[str, torch.Tensor]], str | None]] = [
            ([("a", rows), ("a", rows)], "given twice"),
            ([("a", rows.to_local()), ("b", DTensor.from_local(torch.ones(2), mesh))], None),
        ]
        for source, text in cases:
            try:
                sender.refresh(source)
            except (WeightRequestError, TransportError) as error:
                assert text is None or text in str(error)
            except Exception as error:
                assert rank == 0 and "not connected" in str(error), repr(error)
            else:
                raise AssertionError("nothing was refused")
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    try:
        Gathered(plan_tensors([("p", partial)]), TrainerRanks(None, "cpu", TIMEOUT_S))
    except WeightRequestError as error:
        assert "p: placement Partial" in str(error), str(error)
    else:
        raise AssertionError("a partial tensor was taken")
    assert time.monotonic() - start < 10


def plans_that_differ(rank: int) -> None:
    """Give the ranks plans that differ: both raise before the engine gets a call, and the next refresh works."""
    mesh, other_mesh = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    whole = {f"layers.{i}.w": torch.randn(5 + i, 4) for i in range(4)}
    mine = {name: sharded(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    bias = {"bias": torch.randn(3)}

    def replaced(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return mine | {name: tensor}

    def without(*names: str) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in mine.items() if name not in names}

    w1 = "layers.1.w"
    reverse = dict(reversed(mine.items()))
    twice = [*mine.items(), (w1, mine[w1])]
    flipped = sharded(whole[w1], mesh, [Shard(1)])
    transposed = sharded(whole[w1].T.contiguous(), mesh, [Shard(0)])
    double, replica = sharded(whole[w1].double(), mesh, [Shard(0)]), sharded(whole[w1], mesh, [Replicate()])
    elsewhere = sharded(whole[w1], other_mesh, [Replicate(), Shard(0)])
    partial = DTensor.from_local(mine[w1].to_local(), mesh, [Partial()])
    fused = mine | {"layers.9.experts.gate_up_proj": sharded(torch.ones(4, 6, 2), mesh, [Shard(0)])}
    cases: list[tuple[Any, dict[str, Any], str]] = [  # how rank 1 differs, and the error of both ranks
        (without(w1), {}, f"same tensors: rank 1 lacks {w1}"),
        (without(w1, "layers.3.w"), {}, f"rank 1 lacks {w1} and 1 more"),
        (mine | bias, {}, "rank 0 lacks bias, and rank 1 has it"),
        ({"stage1.w": mine[w1]}, {}, "rank 1 lacks layers.0.w and 3 more; it has stage1.w, and rank 0 does not"),
        (reverse, {}, "tensor 0 is layers.0.w on rank 0 and layers.3.w on rank 1; the order must be equal"),
        (replaced(w1, transposed), {}, f"the shape of {w1} is [6, 4] on rank 0 and [4, 6] on rank 1"),
        (replaced(w1, double), {}, f"the dtype of {w1} is float32 on rank 0 and float64 on rank 1"),
        (replaced(w1, flipped), {}, f"the placement of {w1} is Shard(0) over ranks [0, 1] on rank 0 and Shard(1)"),
        (replaced(w1, replica), {}, f"the placement of {w1} is Shard(0) over"),
        (replaced(w1, elsewhere), {}, f"the placement of {w1} is Shard(0) over"),
        (replaced(w1, whole[w1]), {}, "on rank 0 and whole on rank 1"),
        (replaced(w1, partial), {}, "placement Partial"),
        (twice, {}, f"{w1} is given twice"),
        (
            mine,
            {"coverage": "full"},
            'request different refreshes: coverage is "partial" on rank 0 and "full" on rank 1',
        ),
        (mine, {"bucket_bytes": 40}, "bucket_bytes is 60 on rank 0 and 40 on rank 1"),
        (mine, {"bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
        (mine, {"weight_version": "8"}, 'weight_version is "7" on rank 0 and "8" on rank 1'),
        (mine, {"with_manifest": False}, "with_manifest is true on rank 0 and false on rank 1"),
        (mine, {"dtype": torch.bfloat16}, "the dtype of layers.0.w is float32 on rank 0 and bfloat16 on rank 1"),
        (mine, {"begin_options": {"base_version": "5"}}, 'base_version is "6" on rank 0 and "5" on rank 1'),
        (mine, {"begin_options": {}}, 'base_version is "6" on rank 0 and not given on rank 1'),
        (fused, {"split_experts": False}, "rank 0 lacks layers.9.experts.gate_up_proj, and rank 1 has it"),
    ]
    asked: dict[str, Any] = {"coverage": "partial", "bucket_bytes": 60, "begin_options": {"base_version": "6"}}
    with engines_of(rank, 1) as engines, sender_of(engines) as sender:
        before = [engine.call("content") for engine in engines.values()]
        for source, others, expected in cases:
            options = asked | {"weight_version": "7"} | (others if rank else {})
            try:
                sender.refresh(source if rank else mine, **options)
            except (WeightRequestError, TransportError) as error:
                assert expected in str(error), f"{expected!r} in {error!s}"
            else:
                raise AssertionError(f"{expected}: nothing was refused")
        for engine, content in zip(engines.values(), before):
            assert engine.call("content") == content and not engine.call("status")["open"]
        sender.refresh(fsdp_model(1, mesh), "v1", bucket_bytes=20)
        assert all(engine.call("content") == content_of(1) for engine in engines.values())


def group_of_whole_tensors(rank: int) -> None:
    """Send whole tensors with a trainer group, and refuse rank 1 without a group."""
    mesh = init_device_mesh("cpu", (2,))
    tensors = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    with engines_of(rank, 1) as engines, sender_of(engines, trainer_group=dist.group.WORLD) as sender:
        sources = [tensors, tensors if rank == 0 else {"a": torch.ones(3)}]
        sources[0] = tensors if rank == 0 else {name: sharded(it, mesh, [Shard(0)]) for name, it in tensors.items()}
        for source, expected in zip(sources, ["the placement of a is whole on rank 0", "rank 1 lacks b"]):
            try:
                sender.refresh(source, coverage="partial")
            except WeightRequestError as error:
                assert expected in str(error), str(error)
            else:
                raise AssertionError("nothing was refused")
        sender.refresh(version(1), "v1", bucket_bytes=20)
        assert all(engine.call("content") == content_of(1) for engine in engines.values())
        if rank == 1:
            try:
                WeightSender({}).refresh(tensors)
            except WeightRequestError as error:
                assert "trainer rank 1 has no engines and no sharded tensors" in str(error)
            else:
                raise AssertionError("nothing was refused")


def fsdp_refresh(rank: int) -> None:
    """Refresh two engines from two ranks under every sharding: the ranks and the engines return the same digest."""
    mesh = init_device_mesh("cpu", (2,))
    replicated = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with engines_of(rank, 2) as engines, sender_of(engines) as sender:
        cases = [(mesh, 0, 1 << 20), (mesh, 0, 20), (mesh, 1, 60), (replicated, 0, 60)]
        for seed, (device_mesh, shard_dim, bucket_bytes) in enumerate(cases, start=1):
            model = fsdp_model(seed, device_mesh, shard_dim)
            report = sender.refresh(model, f"v{seed}", bucket_bytes=bucket_bytes)
            assert {e.call("content_digest") for e in engines.values()} <= {report.digest}
            assert all(engine.call("content") == content_of(seed) for engine in engines.values())
            assert report.num_bytes == sum(tensor.nbytes for tensor in version(seed).values())
            digests = torch.zeros(2, 64, dtype=torch.uint8)
            digests[rank] = torch.tensor(list((report.digest or "?" * 64).encode()), dtype=torch.uint8)
            dist.all_reduce(digests)
            assert torch.equal(digests[0], digests[1])
            assert report.engines.keys() == engines.keys()


def replays(rank: int) -> None:
    """Refresh again and again: one plan while the form is the same, and never for shards of another form."""
    mesh = init_device_mesh("cpu", (2,))
    with engines_of(rank, 1) as engines, sender_of(engines) as sender:

        def refresh(source: Any, seed: int, plans: int) -> None:
            report = sender.refresh(source, f"v{seed}", bucket_bytes=60)
            assert {e.call("content_digest") for e in engines.values()} <= {report.digest}
            assert all(engine.call("content") == content_of(seed) for engine in engines.values())
            assert len(sender._plans._plans) == plans, seed

        model = fsdp_model(1, mesh)
        refresh(model, 1, plans=1)
        with torch.no_grad():
            for mine, other in zip(model.parameters(), fsdp_model(2, mesh).parameters()):
                mine.copy_(other)
        refresh(model, 2, plans=1)  # trained
        refresh(fsdp_model(3, mesh), 3, plans=1)  # in other memory
        refresh(fsdp_model(4, mesh, shard_dim=1), 4, plans=2)
        refresh(fsdp_model(5, mesh), 5, plans=2)
        named = list(fsdp_model(6, mesh).state_dict().items())
        refresh(named, 6, plans=3)
        strided = [(name, _strided(tensor)) for name, tensor in named]
        exchanged = [named[1], named[0], *named[2:]] if rank else named
        for source, expected in ((strided, "placement _StridedShard"), (exchanged, "the order must be equal")):
            try:
                sender.refresh(source, "v7", bucket_bytes=60)
            except WeightRequestError as error:
                assert expected in str(error), str(error)
            else:
                raise AssertionError("nothing was refused")
        refresh(fsdp_model(8, mesh), 8, plans=3)


def _strided(tensor: DTensor) -> DTensor:
    placements = [_StridedShard(one.dim, split_factor=2) for one in tensor.placements if isinstance(one, Shard)]
    return DTensor.from_local(
        tensor.to_local(), tensor.device_mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


class Refusing:
    """An engine whose n-th bucket is refused."""

    def __init__(self, engine: Engine, bucket: int) -> None:
        self._engine, self._left = engine, bucket

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            if verb == "update_weights_from_distributed":
                self._left -= 1
                if self._left == 0:
                    arguments["dtypes"] = ["int4"] * len(arguments["dtypes"])
            return getattr(self._engine, verb)(**arguments)

        return call


def engine_refuses(rank: int) -> None:
    """Let one engine refuse a bucket: the refresh ends on both ranks and both engines, and the next one works."""
    mesh = init_device_mesh("cpu", (2,))
    with engines_of(rank, 2) as engines:
        controls: dict[str, Any] = dict(engines)
        if rank == 0:
            controls["engine1"] = Refusing(engines["engine1"], bucket=3)
        with sender_of(controls) as sender:
            start = time.monotonic()
            try:
                sender.refresh(fsdp_model(99, mesh), "v99", bucket_bytes=20)
            except EngineError as error:
                assert rank == 0 and error.failures.keys() == {"engine1"} and "int4" in str(error)
            except TransportError as error:
                assert rank == 1 and "another trainer rank failed" in str(error)
            else:
                raise AssertionError("the refresh went through")
            assert time.monotonic() - start < 10
            for engine in engines.values():
                assert engine.call("content") == content_of(0) and not engine.call("status")["open"]
            if rank == 0:
                sender.connect()  # joins the engine that was lost, too
            sender.refresh(fsdp_model(1, mesh), "v1", bucket_bytes=20)
            assert all(engine.call("content") == content_of(1) for engine in engines.values())


def shared_group_loses_an_engine(rank: int) -> None:
    """Kill one of two engines in a shared group: both ranks begin again, and the other engine gets the version."""
    mesh = init_device_mesh("cpu", (2,))
    with engines_of(rank, 2) as engines:
        sender = WeightSender(engines, timeout_s=TIMEOUT_S, on_engine_failure="leave_out")
        if rank == 0:
            sender.connect(shared=True)
        dist.barrier()  # engines take their time to start, and the other rank's deadline is for the refresh
        killed = engines.get("engine1")
        progress = (lambda done, total: killed.kill()) if killed is not None else None
        report = sender.refresh(fsdp_model(1, mesh), "v1", bucket_bytes=20, progress=progress)
        assert report.weight_version == "v1" and report.left_out == (["engine1"] if rank == 0 else [])
        assert rank or engines["engine0"].call("content") == content_of(1)
        engines.pop("engine1", None)
        report = sender.refresh(fsdp_model(2, mesh), "v2", bucket_bytes=20)
        assert rank or engines["engine0"].call("content") == content_of(2)
        sender.close()


def other_rank_fails(rank: int) -> None:
    """Fail to pack a shard of the third bucket on rank 1: rank 0 is notified, aborts, and both can go on."""
    mesh = init_device_mesh("cpu", (2,))
    pack = Gatherer._pack_mine
    count = 0

    def fail(self: Gatherer, bucket: SharedBucket) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 3:
            raise MemoryError("no room")
        return pack(self, bucket)

    with engines_of(rank, 1) as engines, sender_of(engines) as sender:
        if rank == 1:
            Gatherer._pack_mine = fail  # type: ignore[method-assign]
        start = time.monotonic()
        try:
            sender.refresh(fsdp_model(99, mesh), "v99", bucket_bytes=20)
        except MemoryError:
            assert rank == 1 and count == 3
        except TransportError as error:
            assert rank == 0 and "another trainer rank failed" in str(error)
        else:
            raise AssertionError("the refresh went through")
        Gatherer._pack_mine = pack  # type: ignore[method-assign]
        assert time.monotonic() - start < 10
        for engine in engines.values():
            assert engine.call("content") == content_of(0) and not engine.call("status")["open"]
        sender.refresh(fsdp_model(1, mesh), "v1")
        assert all(engine.call("content") == content_of(1) for engine in engines.values())


def other_rank_dies(rank: int) -> None:
    """Kill rank 1 in the middle: rank 0 reports it within its deadline, and the engine serves its old weights."""
    mesh = init_device_mesh("cpu", (2,))
    with engines_of(rank, 1) as engines, sender_of(engines) as sender:
        gather = Gatherer.gather

        def die(self: Gatherer, bucket: Any, flat: Any) -> None:
            if rank == 1:
                os._exit(7)
            gather(self, bucket, flat)

        Gatherer.gather = die  # type: ignore[method-assign]
        start = time.monotonic()
        try:
            sender.refresh(fsdp_model(99, mesh), "v99", bucket_bytes=20)
        except TransportError as error:
            assert "trainer ranks" in str(error)
        else:
            raise AssertionError("the refresh went through")
        assert time.monotonic() - start < TIMEOUT_S + 5
        for engine in engines.values():
            assert engine.call("content") == content_of(0) and not engine.call("status")["open"]
    os._exit(0)  # the default group cannot be left in an orderly way any more


def serve(rank: int, checkpoint: str, *urls: str) -> None:
    """Send a transformers model, sharded with FSDP2 and trained for a step, to real servers: all digests agree."""
    from transformers import AutoModelForCausalLM  # takes seconds, and only this scenario needs it

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model(input_ids=torch.arange(8)[None], use_cache=False).logits.square().mean().backward()
    optimizer.step()
    whole = {name: tensor.full_tensor() for name, tensor in named_tensors_of(model)}  # type: ignore[attr-defined]
    values = Gathered(plan_tensors(whole, torch.bfloat16)).fingerprints()
    clients = {f"server{i}": RolloutClient(url) for i, url in enumerate(urls)} if rank == 0 else {}
    with sender_of(clients) as sender:
        report = sender.refresh(model, "step-1", dtype=torch.bfloat16, bucket_bytes=64 << 10)
    assert report.num_buckets > 3
    assert report.fingerprints == {name: f"{value:016x}" for name, value in values.items()}
    assert fingerprint(next(iter(whole.values())).to(torch.bfloat16)) == next(iter(values.values()))
    for name, client in clients.items():
        answer = client.weights_checker()
        assert answer["ranks"][0]["checksums"] == report.fingerprints, name
        assert answer["per_engine_checksum"] == report.digest
        assert client.weight_version() == "step-1"
        engine = report.engines[name]
        assert engine.committed and engine.stall_seconds is not None and 0 < engine.stall_seconds < engine.seconds
        assert engine.num_bytes == report.num_bytes
        client.close()


def serve_per_rank(rank: int, checkpoint: str, url: str) -> None:
    """Send shards by rows and by columns to the ranks of a server, each what it keeps; experts move in between."""
    mesh, whole = init_device_mesh("cpu", (2,)), logical_tensors(Path(checkpoint))
    client = RolloutClient(url)
    with sender_of({"server": client} if rank == 0 else {}, per_rank=True) as sender:
        for factor in (1.25, 1.5, 1.75):
            tensors = {
                name: sharded(tensor.float() * factor, mesh, [Shard(number % tensor.dim())])
                for number, (name, tensor) in enumerate(whole.items())
            }
            report = sender.refresh(tensors, f"by {factor}", bucket_bytes=64 << 10)
            values = [fingerprint(tensor.float() * factor) for tensor in whole.values()]
            if rank == 0:
                assert report.fingerprints == {name: f"{value:016x}" for name, value in zip(whole, values, strict=True)}
                assert client.weights_checker()["checksums"] == report.fingerprints
                assert client.weight_version() == f"by {factor}"
                located = httpx.get(f"{url}/expert_location").json()["physical_to_logical_map"]
                half = len(located[0]) // 2
                moved = {"physical_to_logical_map": [row[half:] + row[:half] for row in located]}
                assert httpx.post(f"{url}/eplb_rebalance", json=moved, timeout=TIMEOUT_S).json()["rebalanced"]
    client.close()


SCENARIOS = (
    random_gathers,
    refusals,
    plans_that_differ,
    group_of_whole_tensors,
    fsdp_refresh,
    replays,
    engine_refuses,
    shared_group_loses_an_engine,
    other_rank_fails,
    other_rank_dies,
    serve,
    serve_per_rank,
)


def main(scenarios: str, rank: str, port: str, *words: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), NUM_RANKS, rank == "0")
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=NUM_RANKS)
    for scenario in scenarios.split(","):
        {function.__name__: function for function in SCENARIOS}[scenario](int(rank), *words)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
