"""Quantised weights of a refresh: tensor by tensor and by tables, by turns in one process.

    python -m benchmarks.pair_tables [--threads 1] [--rounds 3]

A model of matrices of one size receives buckets of 16 MiB in a transaction with a manifest of fingerprints.  What is
counted is the process's CPU time from a bucket to its staged weights, without begin and commit.  The first refresh of
each way, which makes plans, is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from rollout.kernels.build import load_kernels
from rollout.kernels.held_places import HELD_FORMS
from rollout.kernels.places import PackedPlace
from weight_sync import fp8_blocks, int4_groups
from weight_sync.content import TensorTable
from weight_sync.fingerprint import fingerprint
from weight_sync.held_format import HeldFormat
from weight_sync.held_memory import Areas
from weight_sync.plan import Planner
from weight_sync.shadow import ShadowStaging
from weight_sync.tensor_meta import BucketLayout, PackedBucket, Piece, Place, TensorMeta
from weight_sync.transaction import WeightTransaction

SIZES = {"4 kB": (32, 128), "32 kB": (128, 128), "an expert's of Qwen3-30B-A3B": (768, 2048)}
CASES = (
    *(("fp8", held) for held in ("bf16", "fp8", "w8")),
    *(("int4", held) for held in ("bf16", "int4")),
    *(("bf16", held) for held in ("fp8", "int4")),
)
"""The forms in which weights are sent, and held."""
BUCKET_BYTES = 16 << 20
MODEL_BYTES = 24 << 20  # in bfloat16
BF16 = torch.bfloat16


class Matrices:
    """A model of `count` matrices, packed as the compiled operators hold them in a format."""

    def __init__(self, shape: tuple[int, int], count: int, held: str) -> None:
        names = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(count)]
        self._metas = {name: TensorMeta(name, BF16, shape) for name in names}
        if held == "bf16":
            storage = torch.ops.lockstep.empty_packed([count], *shape, BF16)
            self._places: list[Place] = [PackedPlace(each, range(shape[0]), shape[1]) for each in storage]
            self.formats: dict[str, HeldFormat] = {}
        else:
            form = HELD_FORMS[held]
            storage = form.empty([count], *shape)
            self._places = [form.place(each, range(shape[0]), shape[1], 1, 0) for each in storage]
            self.formats = dict.fromkeys(names, form.held)
        self._numbers = {name: number for number, name in enumerate(names)}

    def metas(self) -> Mapping[str, TensorMeta]:
        return self._metas

    def split(self, wire: TensorMeta) -> list[Piece]:
        return [Piece(wire.name)]

    def places(self, name: str) -> Sequence[Place]:
        return [self._places[self._numbers[name]]]

    def places_key(self) -> Hashable:
        return None

    def recompute_derived(self) -> None:
        """Do nothing: nothing is computed from weights."""


def parts_of(name: str, values: torch.Tensor, sent: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight, as a trainer sends it."""
    if sent == "bf16":
        return {name: values}
    if sent == "fp8":
        weight, scale = fp8_blocks.quantise(values)
        return {name: weight, f"{name}_scale_inv": scale}
    pair = int4_groups.quantise(values, 32)
    nibbles = (pair.weight + 8).to(torch.uint8).view(values.shape[0], -1, 2)
    words = (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int32)
    return {f"{name}_packed": words, f"{name}_scale": pair.scale, f"{name}_shape": torch.tensor(values.shape)}


def buckets_of(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> list[PackedBucket]:
    """Return buckets with all parts of the weights, each weight in one."""
    found: list[list[Mapping[str, torch.Tensor]]] = [[]]
    room = BUCKET_BYTES
    for parts in tensors.values():
        size = sum(part.nbytes for part in parts.values())
        if size > room:
            found.append([])
            room = BUCKET_BYTES
        found[-1].append(parts)
        room -= size
    return [_packed(dict(itertools.chain.from_iterable(each.items() for each in some))) for some in found]


def _packed(tensors: Mapping[str, torch.Tensor]) -> PackedBucket:
    metas = [TensorMeta(name, part.dtype, tuple(part.shape)) for name, part in tensors.items()]
    *offsets, size = itertools.accumulate((meta.nbytes for meta in metas), initial=0)
    content = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in tensors.values()])
    return PackedBucket(BucketLayout(metas, offsets, size), content)


class Refreshes:
    """Refreshes of one model by one way."""

    def __init__(self, model: Matrices, buckets: Sequence[PackedBucket], by_tables: bool) -> None:
        self._model, self._buckets, self._by_tables = model, buckets, by_tables
        self._planner, self._memory = Planner(TensorTable(model.metas()), model.formats), Areas(keep=True)
        tensors = [tensor for bucket in buckets for tensor in bucket.named()]
        self._stated = [(TensorMeta(name, x.dtype, tuple(x.shape)), fingerprint(x)) for name, x in tensors]

    def seconds(self) -> float:
        """Receive and commit all buckets; return the CPU time of receiving."""
        compiled = mock.patch("weight_sync.plan.is_compiled", lambda device: self._by_tables)
        with compiled:
            transaction = WeightTransaction(
                self._model,
                manifest=self._stated,
                staging=ShadowStaging(self._model, memory=self._memory),
                quantised=self._model.formats,
                planner=self._planner,
            )
            began = time.process_time()
            for bucket in self._buckets:
                transaction.announce(bucket.layout.metas, layouts=[bucket.layout])
                transaction.receive(bucket)
            taken = time.process_time() - began
        transaction.verify()
        transaction.commit(lambda mine: mine)
        transaction.close()
        return taken


def run(rounds: int, console: Console) -> list[dict]:
    """Measure all sizes and formats, print one table, and return its rows."""
    status = load_kernels()
    assert status.available, status.reason
    rows = []
    for (size, shape), (sent, held) in itertools.product(SIZES.items(), CASES):
        count = min(max(MODEL_BYTES // (shape[0] * shape[1] * 2), 2), 512)
        model = Matrices(shape, count, held)
        values = (torch.randn(shape) for _ in range(count))
        tensors = {name: parts_of(name, x.bfloat16(), sent) for name, x in zip(model.metas(), values)}
        ways = {by: Refreshes(model, buckets_of(tensors), by) for by in (False, True)}
        best = dict.fromkeys(ways, float("inf"))
        for number in range(rounds + 1):
            for by, way in ways.items():
                seconds = way.seconds()
                best[by] = min(best[by], seconds if number else float("inf"))
        single, table = (best[by] / count * 1e6 for by in (False, True))
        rows.append({"kind": f"pairs, {sent} to {held}", "weight": size, "single_us": single, "table_us": table})
    _print(rows, console)
    return rows


def _print(rows: list[dict], console: Console) -> None:
    table = Table(title=f"Quantised weights of a refresh, {torch.get_num_threads()} threads, us of CPU a weight")
    for column in ("weight", "sent to held", "tensor by tensor", "by tables"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        name = row["kind"].removeprefix("pairs, ")
        table.add_row(row["weight"], name, f"{row['single_us']:.0f}", f"{row['table_us']:.1f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = run(args.rounds, Console(width=110))
    if args.json is not None:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
