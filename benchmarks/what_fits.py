"""The table "what fits where" of docs/models.md, computed from the numbers of published configurations.

    python -m benchmarks.what_fits

    weights of a rank = (experts x bits of the format + all other weights x 16) / 8 / ranks
    left for KV       = 0.9 x memory - 6 GB - weights of a rank
    tokens of KV      = left / (bytes of a token / ranks that share its heads)

Experts are divided over the ranks by experts or by inner features, other weights by tensor parallelism.  Biases, norms
and routers' corrections are left out: they are below a thousandth.  A latent is whole on each rank.  6 GB are for
activations, captured graphs and libraries.  Projections count with 16 bits, also where `--quantization` holds them in
fewer: it depends on the ranks, whose shares may cut blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

BITS = {"bf16": 16.0, "fp8": 8 + 32 / 128, "int4": 4 + 16 / 32}  # with the scales, as CUDA holds a row
CLUSTERS = ((8, 80), (8, 141), (16, 80), (16, 141), (32, 80))
_SHARE, _KEPT_GB = 0.9, 6.0


@dataclass(frozen=True)
class GroupedHeads:
    """Attention with `heads` queries and `kv_heads` keys and values of `size` each."""

    heads: int
    kv_heads: int
    size: int

    def weights(self, hidden: int) -> int:
        return 2 * hidden * self.size * (self.heads + self.kv_heads)

    def token_bytes(self, ranks: int) -> float:
        """Return the bytes of a layer's KV of one token on a rank, bfloat16."""
        return 2 * self.size * 2 * max(1.0, self.kv_heads / ranks)


@dataclass(frozen=True)
class LatentHeads:
    """Attention over latents of `rank` elements, with `rope` rotated ones; queries come from `query_rank`."""

    heads: int
    query_rank: int
    rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128

    def weights(self, hidden: int) -> int:
        queries = hidden * self.query_rank + self.query_rank * self.heads * (self.nope + self.rope)
        keys_and_values = hidden * (self.rank + self.rope) + self.rank * self.heads * (self.nope + self.value)
        return queries + keys_and_values + self.heads * self.value * hidden

    def token_bytes(self, ranks: int) -> float:
        return 2.0 * (self.rank + self.rope)


@dataclass(frozen=True)
class Published:
    """The numbers of one `config.json`."""

    layers: int
    hidden: int
    vocab: int
    attention: GroupedHeads | LatentHeads
    experts: int
    inner: int
    shared: int = 0
    dense_first: int = 0
    dense_inner: int = 0

    @property
    def expert_weights(self) -> int:
        """Weights of routed experts, which a format holds in fewer bits."""
        return (self.layers - self.dense_first) * self.experts * 3 * self.hidden * self.inner

    @property
    def other_weights(self) -> int:
        sparse = self.layers - self.dense_first
        mlps = 3 * self.hidden * (sparse * self.shared * self.inner + self.dense_first * self.dense_inner)
        routers = sparse * self.experts * self.hidden
        return self.layers * self.attention.weights(self.hidden) + mlps + routers + 2 * self.vocab * self.hidden

    def weight_gb(self, weight_format: str) -> float:
        return (self.expert_weights * BITS[weight_format] + self.other_weights * 16) / 8 / 1e9

    def left_gb(self, weight_format: str, ranks: int, memory_gb: float) -> float:
        """Return the memory of a rank that is left for KV; negative where the weights do not fit."""
        return _SHARE * memory_gb - _KEPT_GB - self.weight_gb(weight_format) / ranks

    def kv_tokens(self, weight_format: str, ranks: int, memory_gb: float) -> float:
        left = self.left_gb(weight_format, ranks, memory_gb) * 1e9
        return left / (self.layers * self.attention.token_bytes(ranks))


MODELS = {
    "DeepSeek-V3": Published(61, 7168, 129280, LatentHeads(128, 1536), 256, 2048, 1, 3, 18432),
    "Kimi-K2": Published(61, 7168, 163840, LatentHeads(64, 1536), 384, 2048, 1, 1, 18432),
    "GLM-4.5": Published(92, 5120, 151552, GroupedHeads(96, 8, 128), 160, 1536, 1, 3, 12288),
    "Qwen3-235B-A22B": Published(94, 4096, 151936, GroupedHeads(64, 4, 128), 128, 1536),
    "Qwen3-30B-A3B": Published(48, 2048, 151936, GroupedHeads(32, 4, 128), 128, 768),
    "gpt-oss-120b": Published(36, 2880, 201088, GroupedHeads(64, 8, 64), 128, 2880),
    "gpt-oss-20b": Published(24, 2880, 201088, GroupedHeads(64, 8, 64), 32, 2880),
}


def table() -> str:
    """Return the table in Markdown: gigabytes of weights on a rank, and millions of tokens that its KV has room for."""
    names = [f"{ranks} \u00d7 {memory} GB" for ranks, memory in CLUSTERS]
    lines = [f"| model | experts | weights, GB | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    for name, model in MODELS.items():
        for weight_format in BITS:
            cells = [_cell(model, weight_format, ranks, memory) for ranks, memory in CLUSTERS]
            lines.append(f"| {name} | {weight_format} | {model.weight_gb(weight_format):,.0f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(model: Published, weight_format: str, ranks: int, memory: int) -> str:
    if model.left_gb(weight_format, ranks, memory) <= 0:
        return "no"
    tokens = model.kv_tokens(weight_format, ranks, memory) / 1e6
    return f"{model.weight_gb(weight_format) / ranks:.1f}; {tokens:.2f}"


if __name__ == "__main__":
    print(table(), end="")
