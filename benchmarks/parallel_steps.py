"""The numbers of the steps that ranks took: rates, medians, and collectives next to the formula."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.parallel_collectives import Engine, StepShape, Tally, step_needs, tally
from benchmarks.parallel_ranks import StepTaken
from rollout.distributed.layout import ParallelLayout

Steps = Sequence[Sequence[StepTaken]]  # by rank


def decode_seconds(steps: Sequence[StepTaken], num_tokens: int) -> list[float]:
    """Return the seconds of the steps in which a rank decoded `num_tokens` requests and did nothing else."""
    return [step.seconds for step in steps if step.num_extend_tokens == 0 and step.num_tokens == num_tokens]


def decode_rate(layout: ParallelLayout, by_rank: Steps, batch: int) -> float:
    """Return the tokens a second of all engines together, each by its own median step."""
    share = batch // (layout.num_replicas * layout.attn_dp_size)
    rates = []
    for replica in range(layout.num_replicas):
        seconds = decode_seconds(by_rank[replica * layout.tp_size], share)
        assert seconds, f"no step decoded {share} requests"
        rates.append(share * layout.attn_dp_size / median(seconds))
    return sum(rates)


def prefill_rate(by_rank: Steps, num_tokens: int) -> float:
    """Return the tokens a second of all prompts, by the time of the rank that was last."""
    return num_tokens / max(sum(step.seconds for step in steps) for steps in by_rank)


def shape_of(layout: ParallelLayout, steps: Sequence[StepTaken]) -> StepShape:
    """Return the shape of one step, as all ranks of an engine took it."""
    first = [step for rank, step in enumerate(steps) if layout.position(rank).attn_tp_rank == 0]
    return StepShape(
        tokens=[step.num_tokens for step in first],
        logits=[step.num_logits for step in first],
        pairs=[step.pairs for step in steps],
    )


def counted(step: StepTaken) -> Tally:
    """Return what the rank's communicators counted."""
    words = {key: key.split() for key in step.sent}
    return {(group, collective): step.sent[key] for key, (group, collective) in words.items()}


def differences(engine: Engine, steps: Sequence[StepTaken], *, routes: bool = False) -> list[str]:
    """Return the differences between a rank's collectives in one step and the formula."""
    shape = shape_of(engine.layout, steps)
    found = []
    for rank, step in enumerate(steps):
        did, needed = counted(step), tally(step_needs(engine, rank, shape, routes=routes))
        for key in sorted(did.keys() | needed.keys()):
            if did.get(key) != needed.get(key):
                found.append(f"rank {rank}, {' '.join(key)}: {did.get(key)} counted, {needed.get(key)} by formula")
    return found
