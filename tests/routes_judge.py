"""An engine of one rank, asked one request at a time: the judge of the routes that several ranks return.

Checkpoints here have decisive routers: the logits of experts that were chosen and that were not are far apart, so that
rounding never decides.

Shapes: L MoE layers, E logical experts, P physical experts (slots over all ranks), T tokens, K top-k.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness, Result

EXPERTS, LAYERS = 8, 2
VOCABULARY = 320
LOGPROB_TOLERANCE = 1e-10  # a step of another size rounds the last bits of a float64 product otherwise

# Slices over two ranks, over four, and over pairs that have neighbours with other tokens.
ALL_TO_ALL: dict[str, dict[str, Any]] = {
    "tp2 all-to-all": {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
    "tp4 all-to-all": {"tp_size": 4, "ep_size": 4, "moe_a2a_backend": "all_to_all"},
    "dp2 of tp4 all-to-all": {
        "tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 4, "moe_a2a_backend": "all_to_all",
    },
}  # fmt: skip
NONE: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2, "ep_size": 2},
    "dp2 of tp4": {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 4},
}
LAYOUTS = ALL_TO_ALL | NONE
SMALL_POOL = {"max_total_tokens": 80, "chunked_prefill_size": 16}  # makes requests of 12 and 24 tokens retract


def decisive_checkpoint(folder: Path, seed: int) -> Path:
    """Write a tiny model, whose first layer is dense, with the values of router matrices doubled."""
    tiny_checkpoint(folder, "moe_dense_first", seed=seed, dtype="float64")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: tensor * (2 if ".mlp.gate." in name else 1) for name, tensor in tensors.items()}, file)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def moved_experts(seed: int, ranks: int, redundant: int = 4) -> dict[str, Any]:
    """Return settings of a random map [L, P] that is nowhere the identity and holds no expert twice on a rank."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(LAYERS):
        slots = np.concatenate([np.arange(EXPERTS), generator.choice(EXPERTS, redundant, replace=False)])
        while not _fits(slots, ranks):
            slots = generator.permutation(slots)
        rows.append(slots.tolist())
    return {
        "ep_num_redundant_experts": redundant,
        "init_expert_location": json.dumps({"physical_to_logical_map": rows}),
    }


def _fits(slots: np.ndarray, ranks: int) -> bool:
    alone = all(len(set(part)) == len(part) for part in np.split(slots, ranks))
    first = [slots.tolist().index(expert) for expert in range(EXPERTS)]
    return alone and sum(slot == expert for expert, slot in enumerate(first)) <= 1


class OneRank:
    """An engine of one rank that computes every request alone, whole, and without a prefix."""

    def __init__(self, folder: Path) -> None:
        self._harness = Harness(folder, dtype="float64", num_threads=1, disable_radix_cache=True)
        self._known: dict[tuple[tuple[int, ...], int], Result] = {}

    def says(self, input_ids: list[int], num_new: int) -> Result:
        """Sample greedily, with all routes."""
        key = (tuple(input_ids), num_new)
        if key not in self._known:
            (self._known[key],) = self._harness.generate([input_ids], {"max_new_tokens": num_new})
        return self._known[key]

    def objections(self, got: Result, num_new: int) -> list[str]:
        """Return what is wrong with a finished request that asked for `num_new` tokens; an aborted one may have fewer.

        It has a row for every token but the last from its start on, all of them right, or none if it did not ask.
        """
        assert got.finished is not None, f"{got.rid} has not finished"
        want, count = self.says(got.prompt_ids, num_new), len(got.token_ids)
        found = []
        if got.finished.reason.type != "abort" and count != num_new:
            found.append(f"{got.rid}: {count} tokens, not {num_new}")
        if got.token_ids != want.token_ids[:count]:
            found.append(f"{got.rid}: other tokens")
        elif got.logprobs and not np.allclose(got.logprobs, want.logprobs[:count], rtol=0, atol=LOGPROB_TOLERANCE):
            found.append(f"{got.rid}: other log-probabilities")
        if got.finished.routed_experts is not None:
            found += self._about_rows(got, want.routes, len(got.prompt_ids) + count - 1)
        return found

    def _about_rows(self, got: Result, want_TLK: np.ndarray, end: int) -> list[str]:
        assert got.finished is not None and got.finished.routed_experts is not None
        start, rows_TLK = got.finished.routed_experts.start, got.routes
        reached = start + len(rows_TLK)
        is_early = got.finished.reason.type == "abort" and not got.token_ids
        if reached > end or (reached != end and not is_early):
            return [f"{got.rid}: rows {start}..{reached}, not to {end}"]
        wrong = np.flatnonzero((rows_TLK != want_TLK[start:reached]).any(axis=(1, 2)))
        return [f"{got.rid}: other routes in the rows {(wrong + start).tolist()}"] if wrong.size else []


class World:
    """The checkpoint of a seed, and the judge."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = decisive_checkpoint(folder, seed), seed
        self.judge = OneRank(self.folder)

    def engine(self, layout: str, **settings: Any) -> ParallelHarness:
        return ParallelHarness(self.folder, **LAYOUTS[layout] | settings)

    def prompt(self, number: int, length: int) -> list[int]:
        return prompt(1000 * self.seed + number, length)

    def moved(self, layout: str) -> dict[str, Any]:
        return moved_experts(self.seed, LAYOUTS[layout]["ep_size"])


def finished(harness: ParallelHarness, world: World, wanted: dict[str, int]) -> list[str]:
    """Run to the end; the judge's objections to the requests, by how many tokens each asked for."""
    harness.run()
    harness.check_idle()
    return [word for rid, count in wanted.items() for word in world.judge.objections(harness.results[rid], count)]


def submit_all(
    harness: ParallelHarness, prompts: Sequence[list[int]], num_new: int = 6, **fields: Any
) -> dict[str, int]:
    return {harness.submit(ids, params={"max_new_tokens": num_new}, **fields): num_new for ids in prompts}
