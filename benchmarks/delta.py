"""Size and time of a weight delta over real optimiser steps, next to other ways to write the same changes.

    a checkpoint in transformers, float32 masters -> Adam at lr 1e-6 on next-token loss -> bfloat16, step by step

Each step's delta leads from the weights before to the weights after, is decoded and compared bit for bit, and undone.
Masters start anywhere between two neighbouring bfloat16 numbers, as they are in the middle of a run: from bfloat16
numbers themselves, the first steps would change almost nothing.  Adam's very first step moves every weight by the whole
rate and is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.shapes import SHAPES, cached_checkpoint
from examples.make_checkpoint.run import CheckpointSpec
from weight_sync.delta.byte_patches import encode_overwrite, encode_xor
from weight_sync.delta.encoder import DeltaEncoder, EncodedDelta
from weight_sync.delta.frame import DeltaFrame, read_frame
from weight_sync.sender import named_tensors_of, split_fused_experts

LEARNING_RATE = 1e-6
BETAS = (0.9, 0.95)
SEQUENCES, POSITIONS = 8, 128
STEPS = 4
TARGET = 35.0
DEMO = "demo"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepSizes:
    """The sizes of one step in bytes.  `entropy`: the least that any code of the changes alone could take."""

    full: int
    elements: int
    changes: int
    one_step: int
    delta: int
    xor_zstd: int
    overwrite_zstd: int
    index_value: int
    entropy: int
    encode_s: float
    decode_s: float


def run(shape: str, console: Console, steps: int = STEPS) -> list[dict]:
    """Measure a shape ("demo", "S" or "M"), print one table, and return its rows, one for each way."""
    table = Table(title=f"Weight delta, {shape}, bfloat16, Adam at lr {LEARNING_RATE:g}")
    for column in ("form", "bytes", "times smaller", "bits a change"):
        table.add_column(column, justify="left" if column == "form" else "right")
    sizes = list(measure(shape, steps))
    rows = []
    for form, label in (
        ("delta", "gaps and directions, zstd"),
        ("xor_zstd", "xor, zstd"),
        ("overwrite_zstd", "positions and bytes, zstd"),
        ("index_value", "int32 index and value"),
        ("entropy", "entropy of positions and steps"),
    ):
        nbytes = median(getattr(step, form) for step in sizes)
        ratios = [step.full / getattr(step, form) for step in sizes]
        bits = median(8 * getattr(step, form) / step.changes for step in sizes)
        table.add_row(label, f"{nbytes:,.0f}", f"{median(ratios):.1f}", f"{bits:.2f}")
        rows.append({"part": "delta", "shape": shape, "form": form, "bytes": nbytes, "ratio": median(ratios)})
    console.print(table)
    changed = median(step.changes / step.elements for step in sizes)
    single = median(step.one_step / step.changes for step in sizes)
    rate = median(step.full / step.encode_s for step in sizes), median(step.full / step.decode_s for step in sizes)
    worst = min(step.full / step.delta for step in sizes)
    console.print(
        f"{changed:.2%} of the elements changed, {single:.1%} of these by one unit in the last place. "
        f"Rate over the full tensors: {rate[0] / 1e6:,.0f} MB/s encoded, {rate[1] / 1e6:,.0f} MB/s decoded. "
        f"Minimum of {len(sizes)} steps: {worst:.1f} times smaller, target {TARGET:g}: "
        + ("ok" if worst >= TARGET else "MISSED")
    )
    for row in rows:
        row |= {"changed": changed, "one_step": single, "encode_bytes_s": rate[0], "decode_bytes_s": rate[1]}
    return rows


def measure(shape: str, steps: int) -> Iterator[StepSizes]:
    """Yield the sizes of each step.  Its delta is also decoded, compared and undone."""
    spec = CheckpointSpec() if shape == DEMO else SHAPES[shape]
    versions = train(str(cached_checkpoint(shape, spec)), spec.vocab_size)
    next(versions)
    old = next(versions)
    encoder = DeltaEncoder(old.items())
    for new in itertools.islice(versions, steps):
        start = time.perf_counter()
        delta = encoder.encode(new.items())
        payloads = delta.payloads()
        encode_s = time.perf_counter() - start
        decode_s, names = 0.0, set[str]()
        for payload, frame in zip(payloads, delta.frames, strict=True):
            start = time.perf_counter()
            decoded = applied(read_frame(payload, 1 << 40), old)
            decode_s += time.perf_counter() - start
            require_equal(decoded, new)
            undone = applied(frame.invert(), decoded)
            require_equal(undone, old)
            assert undone.keys() == decoded.keys(), "an undone frame names the same tensors"
            names |= decoded.keys()
            del decoded, undone
        assert names == new.keys(), "a delta names every tensor"
        yield sizes_of(delta, payloads, old, new, encode_s, decode_s)
        encoder.advance(delta)
        old = new


def applied(frame: DeltaFrame, base: Tensors) -> Tensors:
    """Return the tensors that a frame makes of whole ones."""
    return {delta.entry.meta.name: delta.apply(base[delta.entry.meta.name]) for delta in frame.deltas()}


def train(path: str, vocab_size: int) -> Iterator[Tensors]:
    """Yield copies of the weights in bfloat16, by name and per expert: before the first step, and after each."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            spread_between_neighbours(parameter, generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=BETAS, foreach=False)
    while True:
        # The cast copied them, and nothing here holds them: a second copy of M would not fit next to its optimizer.
        yield dict(split_fused_experts(named_tensors_of(model, torch.bfloat16)))
        ids = torch.randint(0, vocab_size, (SEQUENCES, POSITIONS), generator=generator)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def spread_between_neighbours(parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Move every element by up to half the distance of bfloat16 numbers at its size, in either direction."""
    words = parameter.to(torch.bfloat16).view(torch.int16)
    distance = ((words + 1).view(torch.bfloat16).float() - words.view(torch.bfloat16).float()).abs()
    parameter += (torch.rand(parameter.shape, generator=generator) - 0.5) * distance


def sizes_of(
    delta: EncodedDelta, payloads: list[bytes], old: Tensors, new: Tensors, encode_s: float, decode_s: float
) -> StepSizes:
    steps = np.concatenate([changes.steps_N for changes in delta.changes])
    return StepSizes(
        full=delta.full_bytes,
        elements=delta.num_elements,
        changes=delta.num_changes,
        one_step=int(np.count_nonzero(np.abs(steps) == 1)),
        delta=sum(map(len, payloads)),
        xor_zstd=sum(len(encode_xor(old[name], new[name])) for name in new),
        overwrite_zstd=sum(len(encode_overwrite(old[name], new[name])) for name in new),
        index_value=delta.num_changes * (4 + 2),
        entropy=entropy_bytes(steps, delta.num_elements),
        encode_s=encode_s,
        decode_s=decode_s,
    )


def entropy_bytes(steps: np.ndarray, num_elements: int) -> int:
    """Return the entropy of independent elements that change with one probability, by steps of one distribution."""
    share = steps.size / num_elements
    positions = -num_elements * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    _, counts = np.unique(steps, return_counts=True)
    return math.ceil((positions - float((counts * np.log2(counts / steps.size)).sum())) / 8)


def require_equal(some: Tensors, expected: Tensors) -> None:
    for name, tensor in some.items():
        if not torch.equal(expected[name].view(torch.int16), tensor.view(torch.int16)):
            raise SystemExit(f"{name} was not decoded bit for bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", choices=(DEMO, *SHAPES), nargs="+", default=[DEMO])
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    console = Console()
    for shape in args.shapes:
        run(shape, console, args.steps)


if __name__ == "__main__":
    main()
