"""The tables of bytes of a verify step in docs/benchmarks/drafts.md, counted from a published configuration.

    python -m benchmarks.verify_bytes

    rows             = requests x (1 + depth)
    experts touched  = E x (1 - (1 - K / E) ^ rows) of each layer, as if routes were uniform and independent
    bytes            = dense weights + touched experts + KV, each once a step; KV once a request, or once a row
    pays from        = the acceptance a with 1 + a + .. + a ^ depth = bytes / bytes of a plain step

Drafts from text read nothing themselves.  A draft that is a model reads its own weights, which are not counted here.
The times of kernels and launches are not counted either.
"""

from __future__ import annotations

from dataclasses import dataclass

DEPTHS = range(8)
BATCHES = (1, 16)
CONTEXT = 1024
_ITEM = 2  # bfloat16


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model of grouped heads with experts in all layers, by the names of its `config.json`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    experts: int
    top_k: int
    inner: int
    vocabulary: int

    @property
    def dense_bytes(self) -> int:
        """The bytes of attention, routers and the output head."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return _ITEM * (self.layers * (attention + self.hidden * self.experts) + self.hidden * self.vocabulary)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's KV."""
        return _ITEM * 2 * self.layers * self.kv_heads * self.head_size

    def touched(self, rows: int) -> float:
        """Return how many experts of a layer some row is expected to choose."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** rows)

    def step_bytes(self, batch: int, depth: int, context: int, *, by_row: bool) -> float:
        """Return the bytes that a step reads.  `by_row`: each row reads its request's KV by itself."""
        rows = batch * (1 + depth)
        experts = self.layers * self.touched(rows) * 3 * self.hidden * self.inner * _ITEM
        return self.dense_bytes + experts + (rows if by_row else batch) * context * self.token_bytes


QWEN3_30B_A3B = Sizes(2048, 48, 32, 4, 128, 128, 8, 768, 151936)


def pays_from(ratio: float, depth: int) -> float | None:
    """Return the acceptance of each token from which a step of `depth` pays; None where none does.

    Each drafted token is kept with this probability if the ones before it are.
    """
    if ratio > 1 + depth:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**place for place in range(depth + 1)) < ratio:
            low = middle
        else:
            high = middle
    return high


def table(sizes: Sizes, batch: int, context: int) -> list[str]:
    """Return the rows of a batch, for each depth."""
    lines = [
        "| depth | experts | GB | share | pays from | GB by row | share |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = sizes.step_bytes(batch, 0, context, by_row=False)
    for depth in DEPTHS:
        once, each = (sizes.step_bytes(batch, depth, context, by_row=by_row) for by_row in (False, True))
        least = pays_from(once / plain, depth) if depth else None
        cells = [str(depth), f"{sizes.touched(batch * (1 + depth)):.1f}", f"{once / 1e9:.2f}", f"{once / plain:.2f}"]
        cells += ["-" if least is None else f"{least:.2f}", f"{each / 1e9:.2f}", f"{each / plain:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    for batch in BATCHES:
        print(f"Batch {batch}, {CONTEXT} tokens of context:\n")
        print("\n".join(table(QWEN3_30B_A3B, batch, CONTEXT)), end="\n\n")


if __name__ == "__main__":
    main()
