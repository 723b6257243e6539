"""Tokens a second from measured seconds, and the most that the machine's floor allows.

Shape legend: T tokens, D hidden, K experts per token.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.floor import Machine, decode_step_floor_s
from examples.make_checkpoint.run import CheckpointSpec


@dataclass(frozen=True)
class Cell:
    """One column: decoding with a batch, or, with `new_tokens` 1, reading one long prompt."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def name(self) -> str:
        return f"b{self.batch}" if self.new_tokens > 1 else f"prefill {self.prompt_tokens}"

    @property
    def counts(self) -> tuple[int, ...]:
        """New tokens of the requests that one measurement takes."""
        return (1, self.new_tokens) if self.new_tokens > 1 else (1,)


def tokens_per_s(cell: Cell, seconds: list[tuple[float, ...]]) -> float | None:
    """Return the tokens a second by the median round.  `seconds` holds for each round the times of `cell.counts`.

    Decoding leaves the prompts out: its tokens are batch * (new_tokens - 1), and its time is the time of the long
    request less the time of the request with a single token.  The rate is None if noise has swallowed that difference.
    """
    tokens = cell.prompt_tokens if cell.new_tokens == 1 else cell.new_tokens - 1
    median = statistics.median(counted_s(seconds))
    return cell.batch * tokens / median if median > 0 else None


def counted_s(seconds: list[tuple[float, ...]]) -> list[float]:
    """Return each round's time that counts: of the prompt, or in decoding without it, which noise can make negative."""
    return [times[0] if len(times) == 1 else times[1] - times[0] for times in seconds]


def floor_tokens_per_s(spec: CheckpointSpec, cell: Cell, machine: Machine) -> float:
    """Return the most tokens a second that reading the memory once, and the arithmetic, would allow."""
    if cell.new_tokens > 1:
        context = cell.prompt_tokens + cell.new_tokens // 2
        return cell.batch / decode_step_floor_s(spec, cell.batch, context, machine)
    return cell.batch * cell.prompt_tokens / _prefill_floor_s(spec, cell, machine)


def _prefill_floor_s(spec: CheckpointSpec, cell: Cell, machine: Machine) -> float:
    """Return the floor of a causal forward: products over T tokens, the head for the last only; weights read once."""
    num_tokens = cell.prompt_tokens
    dense = spec.hidden_size * (spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads) + spec.experts)
    expert = 3 * spec.hidden_size * spec.moe_intermediate_size
    head = spec.hidden_size * spec.vocab_size
    pairs = num_tokens * (num_tokens + 1) // 2
    layer = 2 * num_tokens * (dense + spec.top_k * expert) + 4 * spec.heads * spec.head_dim * pairs
    flops = cell.batch * (spec.layers * layer + 2 * head)
    numel = spec.layers * (dense + spec.experts * expert) + head
    return max(2 * numel / machine.read_bytes_per_s, flops / machine.bf16_flops_per_s)
