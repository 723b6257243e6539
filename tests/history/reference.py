"""One sequence in float64 in which every token has weights of its own: the judge of tokens sampled across a refresh.

Token t is computed with the weights of the version that wrote its KV.  Its query meets the keys and values that the
earlier tokens got under theirs.  With one version throughout it must equal the plain forward of `tests.reference`.
It has no cache, no batching and no fused weights, and takes only the record of the config from the engine.

Shapes: T tokens, D hidden, V vocabulary, L MoE layers, K top-k, E experts, H heads, hd head size, R rows of a version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rollout.core.specs.model_config import ModelConfig

Tensors = Mapping[str, torch.Tensor]


@dataclass
class MixedOutput:
    """`logits[t]` predict token t + 1; `routes[t, l]` are the experts of token t, best first.

    `margin`: the smallest difference between two probabilities on which the order or the set of experts depends.
    Tokens whose experts were given do not count.
    """

    logits: torch.Tensor  # [T, V] float64
    routes: torch.Tensor  # [T, L, K] int64, logical ids
    margin: float


@dataclass
class Branches:
    """Several continuations of one prompt, end to end behind it: positions of tokens, and the tokens they see."""

    position_T: torch.Tensor  # int64
    sees_TT: torch.Tensor  # bool

    @staticmethod
    def of(num_prompt: int, lengths: Sequence[int]) -> Branches:
        branch_T = torch.tensor([-1] * num_prompt + [b for b, length in enumerate(lengths) for _ in range(length)])
        position_T = torch.tensor([*range(num_prompt), *(num_prompt + i for length in lengths for i in range(length))])
        mine_TT = (branch_T[:, None] == branch_T) | (branch_T == -1)
        return Branches(position_T, mine_TT & torch.ones_like(mine_TT).tril())


class MixedReference:
    """`contents[v]` are the logical tensors of version v by checkpoint name; the list may grow."""

    def __init__(self, config: ModelConfig, contents: Sequence[Tensors] | Mapping[int, Tensors]) -> None:
        self._config = config
        self._contents = contents
        self._widened: dict[int, Tensors] = {}
        self._margin, self._tie = torch.inf, 0.0

    def forward(
        self,
        input_ids: Sequence[int],
        version_T: Sequence[int],
        given_TLK: torch.Tensor | None = None,
        tie: float = 0.0,
        branches: Branches | None = None,
    ) -> MixedOutput:
        """Compute the whole sequence at once, token t under version `version_T[t]`.

        `given_TLK` has experts that a token takes if each is within `tie` of the router's own choice in probability.
        In rows of -1 the router chooses.  `branches` describes several continuations in one sequence.
        """
        config = self._config
        self._margin, self._tie = torch.inf, tie
        self._branches = branches or Branches.of(len(input_ids), [])
        versions = torch.tensor(version_T)
        ids = torch.tensor(input_ids)
        hidden = torch.empty(len(input_ids), config.hidden_size, dtype=torch.float64)
        for weights, rows in self._by_version(versions):
            hidden[rows] = weights["model.embed_tokens.weight"][ids[rows]]
        routes = []
        for layer in range(config.num_hidden_layers):
            hidden = hidden + self._attention(layer, hidden, versions)
            given_TK = None
            if given_TLK is not None and layer in config.moe_layer_ids:
                given_TK = given_TLK[:, config.moe_layer_ids.index(layer)]
            update, chosen = self._feed_forward(layer, hidden, versions, given_TK)
            hidden = hidden + update
            if chosen is not None:
                routes.append(chosen)
        logits = torch.empty(len(input_ids), config.vocab_size, dtype=torch.float64)
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        for weights, rows in self._by_version(versions):
            logits[rows] = self._norm(hidden[rows], weights["model.norm.weight"]) @ weights[head].T
        return MixedOutput(logits, torch.stack(routes, dim=1), self._margin)

    def _by_version(self, versions: torch.Tensor) -> Iterator[tuple[Tensors, torch.Tensor]]:
        """Yield each version's tensors, and the tokens [R] that it computes."""
        for version in versions.unique().tolist():
            if version not in self._widened:
                self._widened[version] = {name: each.double() for name, each in self._contents[version].items()}
            yield self._widened[version], (versions == version).nonzero().squeeze(1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self._config.norm.eps)

    def _rotate(self, heads_RHd: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        size = self._config.layers[0].attention.head_dim
        half = size // 2
        exponents = [self._config.layers[0].attention.rotary.theta ** (-2.0 * i / size) for i in range(half)]
        frequencies = torch.tensor(exponents, dtype=torch.float64)
        angles = positions_R.double()[:, None, None] * frequencies
        first, second = heads_RHd[..., :half], heads_RHd[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _attention(self, layer: int, hidden: torch.Tensor, versions: torch.Tensor) -> torch.Tensor:
        config, prefix = self._config, f"model.layers.{layer}"
        tokens, size = hidden.shape[0], config.layers[0].attention.head_dim
        query = torch.empty(tokens, config.layers[0].attention.num_heads, size, dtype=torch.float64)
        key = torch.empty(tokens, config.layers[0].attention.num_kv_heads, size, dtype=torch.float64)
        value = torch.empty_like(key)
        for weights, rows in self._by_version(versions):
            normed = self._norm(hidden[rows], weights[f"{prefix}.input_layernorm.weight"])
            q, k, v = (
                (normed @ weights[f"{prefix}.self_attn.{part}_proj.weight"].T).unflatten(1, (-1, size))
                for part in "qkv"
            )
            positions = self._branches.position_T[rows]
            query[rows] = self._rotate(self._norm(q, weights[f"{prefix}.self_attn.q_norm.weight"]), positions)
            key[rows] = self._rotate(self._norm(k, weights[f"{prefix}.self_attn.k_norm.weight"]), positions)
            value[rows] = v
        group = config.layers[0].attention.num_heads // config.layers[0].attention.num_kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,shd->hts", query, key) / size**0.5
        scores = scores.masked_fill(~self._branches.sees_TT, float("-inf"))
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), value).flatten(1)
        output = torch.empty_like(hidden)
        for weights, rows in self._by_version(versions):
            output[rows] = mixed[rows] @ weights[f"{prefix}.self_attn.o_proj.weight"].T
        return output

    def _feed_forward(
        self, layer: int, hidden: torch.Tensor, versions: torch.Tensor, given_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the block's output [T, D] and, of a MoE layer, the chosen experts [T, K]."""
        config, prefix = self._config, f"model.layers.{layer}"
        sparse = layer in config.moe_layer_ids
        output = torch.empty_like(hidden)
        chosen = torch.empty(hidden.shape[0], config.num_experts_per_tok, dtype=torch.int64) if sparse else None
        for weights, rows in self._by_version(versions):
            normed = self._norm(hidden[rows], weights[f"{prefix}.post_attention_layernorm.weight"])
            if chosen is None:
                output[rows] = _swiglu(weights, f"{prefix}.mlp", normed)
            else:
                output[rows], chosen[rows] = self._moe(
                    weights, f"{prefix}.mlp", normed, None if given_TK is None else given_TK[rows]
                )
        return output, chosen

    def _moe(
        self, weights: Tensors, prefix: str, x_RD: torch.Tensor, given_RK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self._config
        probabilities_RE = (x_RD @ weights[f"{prefix}.gate.weight"].T).softmax(-1)
        ranked_RE, order_RE = probabilities_RE.sort(dim=-1, descending=True, stable=True)
        gaps_R = (-ranked_RE[:, : config.num_experts_per_tok + 1].diff(dim=1)).amin(1)
        chosen_RK = order_RE[:, : config.num_experts_per_tok]
        scores_RK = ranked_RE[:, : config.num_experts_per_tok]
        if given_RK is not None:
            is_given_R = (given_RK >= 0).all(1)
            gaps_R = gaps_R.masked_fill(is_given_R, torch.inf)
            near_R = (probabilities_RE.gather(1, given_RK.clamp(min=0)) - scores_RK).abs().amax(1) <= self._tie
            chosen_RK = torch.where((is_given_R & near_R)[:, None], given_RK, chosen_RK)
            scores_RK = probabilities_RE.gather(1, chosen_RK)
        self._margin = min(self._margin, float(gaps_R.min()))
        if config.moe is not None and config.moe.router.normalise:
            scores_RK = scores_RK / scores_RK.sum(-1, keepdim=True)
        scores_RE = torch.zeros_like(probabilities_RE).scatter(1, chosen_RK, scores_RK)
        output = torch.zeros_like(x_RD)
        for expert in chosen_RK.unique().tolist():
            output += scores_RE[:, expert, None] * _swiglu(weights, f"{prefix}.experts.{expert}", x_RD)
        return output, chosen_RK


def _swiglu(weights: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ weights[f"{prefix}.{part}_proj.weight"].T for part in ("gate", "up"))
    return (gate * torch.sigmoid(gate) * up) @ weights[f"{prefix}.down_proj.weight"].T
