"""The communication of one step of a layout, by formula: which collective, how often, how many bytes.

docs/parallelism.md has the formulas.  They know the layout, the model's sizes and the step's tokens, and no
code of the engine; `Communicator.counts` is what the engine did.

Shapes: T tokens of an attention-DP rank, D hidden, V vocabulary, K top-k, L MoE layers, N ranks of an engine, G ranks
that share tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.layout import ParallelLayout

INBOX_BYTES = 24 + 4096  # the time, what is served, a size, and room for the messages that most turns bring
ONE_ROUND_BYTES = 64 << 10  # a sum of up to this size goes in one round, a larger one in two
COUNT_BYTES = 8
PAIR_ID_BYTES = 4  # of the `all_to_all` dispatcher
ID_BYTES = 8

Tally = dict[tuple[str, str], tuple[int, int]]  # (group, collective) -> calls, bytes sent to others


@dataclass(frozen=True)
class Need:
    """The calls of one collective that one rank needs in one step."""

    purpose: str
    group: str
    collective: str
    calls: int
    num_bytes: int


@dataclass(frozen=True)
class StepShape:
    """`tokens` and `logits` (rows) of each attention-DP rank; `pairs[i][j]`: (token, expert) pairs that rank i sent to
    rank j in all MoE layers together, only where the dispatcher sends pairs."""

    tokens: Sequence[int]
    logits: Sequence[int]
    pairs: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Engine:
    """The facts that the formulas know of an engine.  `itemsize`: bytes of an element of its dtype."""

    layout: ParallelLayout
    config: ModelConfig
    dispatcher: str
    itemsize: int

    @property
    def row_bytes(self) -> int:
        return self.config.hidden_size * self.itemsize

    @property
    def scatters(self) -> bool:
        """True if each of the ranks that share tokens routes a slice of them."""
        return self.dispatcher != "none" and self.layout.attn_tp_size > 1


def step_needs(engine: Engine, rank: int, step: StepShape, *, routes: bool = False) -> list[Need]:
    """Return the needs of `rank` in a turn without messages.  `routes`: whether they are recorded."""
    return [] if engine.layout.tp_size == 1 else list(_needs(engine, rank, step, routes))


def tally(needs: Sequence[Need]) -> Tally:
    """Sum needs by group and collective, as a communicator counts."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for need in needs:
        total = sums[need.group, need.collective]
        total[0] += need.calls
        total[1] += need.num_bytes
    return {key: (calls, num_bytes) for key, (calls, num_bytes) in sums.items()}


def _needs(engine: Engine, rank: int, step: StepShape, routes: bool) -> Iterator[Need]:
    layout, config = engine.layout, engine.config
    place = layout.position(rank)
    tokens, shared = step.tokens[place.attn_dp_rank], layout.attn_tp_size
    sparse = len(config.moe_layer_ids)
    dense = config.num_hidden_layers - sparse
    yield Need("inbox, clock, epoch", "tp", "broadcast", 1, 0 if rank else INBOX_BYTES * (layout.tp_size - 1))
    if layout.attn_dp_size > 1:
        num_bytes = 2 * COUNT_BYTES * (layout.attn_dp_size - 1)
        yield Need("token counts and kinds of steps", "attn_dp", "all_gather", 1, num_bytes)
    members = _Members("attn_tp", shared, place.attn_tp_rank)
    summed = 2 * dense + (0 if engine.scatters else sparse)
    yield from members.sums("sums after attention and dense blocks", tokens, engine.row_bytes, summed)
    if engine.scatters:
        yield from members.slices("slices of tokens", tokens, engine.row_bytes, sparse)
    yield from _experts(engine, rank, step, sparse)
    logits = step.logits[place.attn_dp_rank]
    if shared > 1 and logits and not config.tie_word_embeddings:
        columns = -(-config.vocab_size // shared)
        yield Need("logits", "attn_tp", "all_gather", 1, logits * columns * engine.itemsize * (shared - 1))
    if engine.scatters and tokens and routes:
        ids = -(-tokens // shared) * sparse * config.num_experts_per_tok
        # They travel with the slices of the last MoE layer.
        yield Need("routes", "attn_tp", "all_gather", 0, ids * _id_bytes(config.num_experts) * (shared - 1))


def _experts(engine: Engine, rank: int, step: StepShape, sparse: int) -> Iterator[Need]:
    layout, config = engine.layout, engine.config
    size, place, row = layout.tp_size, layout.position(rank), engine.row_bytes
    tokens = step.tokens[place.attn_dp_rank]
    if engine.dispatcher == "all_to_all":
        sent, received = sum(step.pairs[rank]), sum(counts[rank] for counts in step.pairs)
        yield Need("pairs: counts", "tp", "all_gather", sparse, sparse * COUNT_BYTES * size * (size - 1))
        away, arrived = sent - step.pairs[rank][rank], received - step.pairs[rank][rank]
        # Called by all ranks, also by ranks that send nothing.
        there, back = away * (row + PAIR_ID_BYTES), arrived * row
        yield Need("pairs: there and back", "tp", "all_to_all", 2 * sparse, there + back)
        return
    if layout.attn_dp_size == 1:
        yield from _Members("tp", size, place.tp_rank).sums("sums after experts", tokens, row, sparse)
        return
    packed = row + config.num_experts_per_tok * (engine.itemsize + ID_BYTES)
    gathered = max(step.tokens) * packed * (layout.attn_dp_size - 1)
    yield Need("all tokens to all ranks", "attn_dp", "all_gather", sparse, sparse * gathered)
    parts = layout.attn_tp_size * sum(step.tokens) - tokens
    yield Need("parts back to their ranks", "tp", "all_to_all", sparse, sparse * parts * row)


def _id_bytes(num_experts: int) -> int:
    return 1 if num_experts <= 256 else 2 if num_experts <= 32768 else 4


@dataclass(frozen=True)
class _Members:
    """A group seen from its member `rank`."""

    group: str
    size: int
    rank: int

    def sums(self, purpose: str, rows: int, row_bytes: int, times: int) -> Iterator[Need]:
        """Yield the needs of `times` sums over the group, of `rows` rows each."""
        num_bytes = rows * row_bytes
        if self.size == 1 or rows == 0 or times == 0:
            return
        if num_bytes <= ONE_ROUND_BYTES or rows < self.size:
            yield Need(purpose, self.group, "all_gather", times, times * num_bytes * (self.size - 1))
        else:
            yield from self.slices(purpose, rows, row_bytes, times)

    def slices(self, purpose: str, rows: int, row_bytes: int, times: int) -> Iterator[Need]:
        """Yield the needs of `times` sums of which each rank gets a slice, and later all ranks get all slices."""
        if rows == 0:
            return
        mine, most = rows // self.size + (self.rank < rows % self.size), -(-rows // self.size)
        yield Need(purpose, self.group, "all_to_all", times, times * row_bytes * (rows - mine))
        yield Need(purpose, self.group, "all_gather", times, times * row_bytes * most * (self.size - 1))
