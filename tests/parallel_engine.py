"""One rank's model, runner, KV pool and recorders, run through a script of steps; and the same of one rank alone.

A script is a list of steps; request r lives on attention-DP rank r % (number of DP ranks).  Results are
collected by (step, request), so that layouts can be compared although their batches differ.

Shapes: T tokens of a request in a step, D hidden, V vocabulary, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from capture.slot_store import RouteSlotStore
from eplb.expert_location import ExpertLocationMetadata, trivial_location
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import MakeTransport, Parallel
from rollout.executor.model_runner import ModelRunner
from rollout.families.registry import load_model_config
from rollout.kernels.ops import Ops
from rollout.model.model_state import ModelState
from tests.forward_harness import ForwardHarness
from tests.model_zoo import load_tiny, placed
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Step:
    """Requests' next tokens: `extends` several each, `decodes` one each."""

    extends: Mapping[int, Sequence[int]] = field(default_factory=dict)
    decodes: Mapping[int, int] = field(default_factory=dict)

    def part(self, dp_rank: int, dp_size: int) -> Step:
        return Step(
            {r: tokens for r, tokens in self.extends.items() if r % dp_size == dp_rank},
            {r: token for r, token in self.decodes.items() if r % dp_size == dp_rank},
        )

    @property
    def counts(self) -> list[int]:
        return [*map(len, self.extends.values()), *(1 for _ in self.decodes)]


@dataclass
class Rows:
    """The results of one request in one step."""

    hidden_TD: torch.Tensor
    logits_TV: torch.Tensor
    routes_TLK: torch.Tensor


Results = dict[tuple[int, int], Rows]


def _tokens(count: int, seed: int) -> list[int]:
    return torch.randint(320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# Ragged prefills, chunks on top of a prefix, decodes in the same steps, and one token in all; some ranks are idle
# with 2 or 4 DP ranks.
MIXED: list[Step] = [
    Step({0: _tokens(7, 0), 1: _tokens(3, 1)}),
    Step({2: _tokens(5, 2)}, {0: 11}),
    Step({}, {1: 12}),
    Step({0: _tokens(4, 3), 3: _tokens(2, 4)}, {1: 13, 2: 14}),
    Step({}, {0: 15, 1: 16, 2: 17, 3: 18}),
    Step({1: _tokens(1, 5)}, {}),
]


class RankEngine:
    """One rank's view of an engine on the checkpoint in `folder`."""

    def __init__(
        self,
        folder: Path,
        parallel: Parallel | None = None,
        moe_a2a_backend: str = "none",
        metadata: ExpertLocationMetadata | None = None,
        dtype: torch.dtype = torch.float64,
        ops: Ops | None = None,
        attention: str = "torch_native",
    ) -> None:
        self.parallel = parallel or Parallel()
        config = load_model_config(folder)
        layers = len(config.moe_layer_ids)
        self.placement = placed(metadata or trivial_location(layers, config.num_experts), parallel)
        self.model = load_tiny(folder, dtype, self.placement, ops, parallel, moe_a2a_backend)
        self.harness = ForwardHarness(self.model, backend=attention)
        pool = self.harness.pool
        store = None
        if config.is_moe:
            store = RouteSlotStore(pool.k[0].shape[0], layers, config.num_experts_per_tok, config.num_experts)
        state = ModelState(self.model, self.placement, "v")
        states = self.harness.state_pool
        self.runner = ModelRunner(state, pool, self.harness.attention, store, state_pool=states)

    def step(self, number: int, whole: Step) -> Results:
        """Run this rank's part of a step, and return the rows by request."""
        layout, position = self.parallel.layout, self.parallel.position
        parts = [whole.part(dp_rank, layout.attn_dp_size) for dp_rank in range(layout.attn_dp_size)]
        mine = parts[position.attn_dp_rank]
        batch = self.harness.batch(mine.extends, mine.decodes)
        if layout.attn_dp_size > 1:
            batch.global_num_tokens = [sum(part.counts) for part in parts]
        hidden_TD, routes = self.runner.forward(batch)
        logits_TV = self.runner.logits(hidden_TD[batch.logits_rows])
        if routes is not None:
            self.runner.keep_routes(routes)
        if self.runner.route_store is None:
            routes_TLK = torch.empty(batch.num_tokens, 0, 0)
        else:
            rows_TLK = self.runner.route_store.read(batch.out_cache_loc.numpy())
            routes_TLK = torch.from_numpy(rows_TLK.astype(np.int64))
        split = [tensor.split(mine.counts) for tensor in (hidden_TD, logits_TV, routes_TLK)]
        requests = (*mine.extends, *mine.decodes)
        return {(number, request): Rows(*rows) for request, *rows in zip(requests, *split, strict=True)}

    def run(self, script: Sequence[Step]) -> Results:
        results: Results = {}
        for number, step in enumerate(script):
            results |= self.step(number, step)
        return results


@torch.inference_mode()
def one_rank(folder: Path, script: Sequence[Step], batches_of: int = 1, **settings: object) -> Results:
    """Run the engine of one rank, a step's requests in as many batches as `batches_of` DP ranks make of them."""
    engine, results = RankEngine(folder, **settings), {}  # type: ignore[arg-type,var-annotated]
    for number, step in enumerate(script):
        for part in (step.part(dp_rank, batches_of) for dp_rank in range(batches_of)):
            results |= engine.step(number, part) if part.counts else {}
    return results


def several_ranks(
    folder: Path,
    layout: ParallelLayout,
    script: Sequence[Step],
    device_transport: MakeTransport | None = None,
    **settings: object,
) -> list[Results]:
    """Return the results by rank."""

    def run(parallel: Parallel) -> Results:
        return RankEngine(folder, parallel, **settings).run(script)  # type: ignore[arg-type]

    return run_ranks(layout, run, device_transport=device_transport)


def run_script(
    parallel: Parallel, folder: Path, script: Sequence[Step], moe_a2a_backend: str, attention: str = "torch_native"
) -> Results:
    """Return the results of one rank, as a function that a process can be given."""
    return RankEngine(folder, parallel, moe_a2a_backend, attention=attention).run(script)


def largest_difference(found: Sequence[Results], expected: Results) -> float:
    """Return the largest difference of hidden states and logits, over all ranks.

    Raises `AssertionError` for other routes, or missing rows.
    """
    assert set().union(*found) == expected.keys()
    largest = 0.0
    for results in found:
        for key, rows in results.items():
            want = expected[key]
            assert torch.equal(rows.routes_TLK, want.routes_TLK), f"other routes of request {key[1]} in step {key[0]}"
            for mine, theirs in ((rows.hidden_TD, want.hidden_TD), (rows.logits_TV, want.logits_TV)):
                assert mine.shape == theirs.shape
                difference = (mine - theirs).abs().max().item()
                assert difference == difference, f"not a number for request {key[1]} in step {key[0]}"
                largest = max(largest, difference)
    return largest
