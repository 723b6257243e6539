"""`gated_delta`: the gated delta rule over the sequences of a step.

It takes projections [T, C + H dv + 2 H] of mixed queries, keys and values, output gates, b and a.  It returns values
read from the states, normed and gated [T, H dv].  The convolution has a weight [w, C]; its inputs before a token are in
the pool [R, w - 1, C], states in the pool [R, H, dk, dv].  Sequence n has query_lens[n] tokens.  It begins from the row
sources[n], or from zeros where this number is negative, and ends in rows[n].  `snapshots` [M, 3] are (n, tokens of the
step, row): copies on the way.  No sequence writes a row that another sequence of the step begins from.  Nothing is kept
in a negative row, and a snapshot of a negative sequence is none: so padding rows of a captured step change no state.

It rounds as transformers `models/qwen3_next` does: the convolution, its silu, the sigmoid of beta and the values read
from the state before their norm to the model's dtype; everything between is float32, or float64 for float64.  Sequences
go side by side, token by token: padding and the begin of a step change no token.  Gradients do not pass through the
pools.

Shapes: T tokens, t of one sequence, N sequences, n of them that have a token at a position, M snapshots, R rows of the
pools, Hk key heads, H value heads, dk and dv sizes of a head's keys and values, C = 2 Hk dk + H dv channels of the
convolution over w tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from rollout.kernels.operator import Gradient, operator

_L2_EPS = 1e-6
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys [T, H, dk], values [T, H, dv]


@operator(
    "(Tensor projected, Tensor conv_weight, Tensor a_log, Tensor dt_bias, Tensor norm_weight, float eps, "
    "Tensor(a!) conv_pool, Tensor(b!) state_pool, Tensor query_lens, Tensor rows, Tensor sources, "
    "Tensor snapshots) -> Tensor",
    Gradient(
        flows=("projected",),
        weights=("conv_weight", "a_log", "dt_bias", "norm_weight"),
        pools=("conv_pool", "state_pool"),
    ),
)
def gated_delta(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    query_lens: torch.Tensor,
    rows: torch.Tensor,
    sources: torch.Tensor,
    snapshots: torch.Tensor,
) -> torch.Tensor:
    num_heads, key_dim, value_dim = state_pool.shape[1:]
    sizes = [conv_pool.shape[2], num_heads * value_dim, num_heads, num_heads]
    mixed_TC, z_TV, b_TH, a_TH = projected.split(sizes, dim=-1)
    work = torch.promote_types(projected.dtype, torch.float32)
    beta_TH = b_TH.sigmoid().to(work)
    decay_TH = (-a_log.to(work).exp() * F.softplus(a_TH.to(work) + dt_bias.to(work))).exp()
    lengths, ends = query_lens.tolist(), rows.tolist()
    copies = [(n, done, to) for n, done, to in snapshots.tolist()]
    copies += [(n, length, ends[n]) for n, length in enumerate(lengths)]
    copies = [copy for copy in copies if copy[0] >= 0 and copy[2] >= 0]
    inputs, states = (_before(pool, sources.tolist()) for pool in (conv_pool, state_pool))
    inputs = [torch.cat(parts) for parts in zip(inputs, mixed_TC.split(lengths), strict=True)]
    convolved_TC = torch.cat([_convolved(inputs_tC, conv_weight, work) for inputs_tC in inputs])
    heads = _heads(convolved_TC, num_heads, key_dim, value_dim, work)
    read_THv = _recurrence(heads, beta_TH, decay_TH, states, lengths, copies, state_pool)
    for n, done, to in copies:
        conv_pool[to] = inputs[n][done : done + conv_pool.shape[1]].detach()
    gate_THv = F.silu(z_TV.unflatten(-1, (num_heads, value_dim)).to(work))
    normed_THv = F.rms_norm(read_THv.to(projected.dtype), (value_dim,), None, eps) * norm_weight
    return (normed_THv * gate_THv).to(projected.dtype).flatten(1)


def _before(pool: torch.Tensor, sources: Sequence[int]) -> list[torch.Tensor]:
    return [pool[source] if source >= 0 else torch.zeros_like(pool[0]) for source in sources]


def _convolved(inputs_tC: torch.Tensor, weight_wC: torch.Tensor, work: torch.dtype) -> torch.Tensor:
    """Compute silu of the convolution [t, C] of t + w - 1 inputs."""
    windows_tCw = inputs_tC.to(work).unfold(0, weight_wC.shape[0], 1)
    return F.silu((windows_tCw * weight_wC.to(work).t()).sum(-1).to(inputs_tC.dtype))


def _heads(mixed_TC: torch.Tensor, num_heads: int, key_dim: int, value_dim: int, work: torch.dtype) -> Heads:
    """Split into heads: queries and keys scaled to length one, queries also divided by the root of dk, and values."""
    keys = (mixed_TC.shape[1] - num_heads * value_dim) // 2
    query, key, value = mixed_TC.to(work).split([keys, keys, num_heads * value_dim], dim=-1)
    query, key = (_unit(part.unflatten(-1, (-1, key_dim))) for part in (query, key))
    query, key = (part.repeat_interleave(num_heads * key_dim // keys, dim=1) for part in (query, key))
    return query * key_dim**-0.5, key, value.unflatten(-1, (num_heads, value_dim))


def _unit(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + _L2_EPS)


def _recurrence(
    heads: Heads,
    beta_TH: torch.Tensor,
    decay_TH: torch.Tensor,
    states: Sequence[torch.Tensor],
    lengths: Sequence[int],
    copies: Sequence[tuple[int, int, int]],
    pool: torch.Tensor,
) -> torch.Tensor:
    """Return the values that the queries read from the states [T, H, dv], and write the copies to the pool.

    Sequences are sorted by length, so that the first n of them have a token at a position.
    """
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    place = {n: at for at, n in enumerate(order)}
    ends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for n, done, to in copies:
        ends[done].append((n, to))
    tokens, counts = _by_position(lengths, order)
    by_position = torch.tensor(tokens, device=pool.device)
    state_nHkv = torch.stack([states[n] for n in order]).to(beta_TH.dtype)
    parts = [x.index_select(0, by_position).split(counts) for x in (*heads, beta_TH, decay_TH)]
    read = []
    for done, (query_nHk, key_nHk, value_nHv, beta_nH, decay_nH) in enumerate(zip(*parts, strict=True), start=1):
        state_nHkv = state_nHkv[: len(beta_nH)] * decay_nH[..., None, None]
        known_nHv = (state_nHkv * key_nHk.unsqueeze(-1)).sum(2)
        change_nHv = (value_nHv - known_nHv) * beta_nH.unsqueeze(-1)
        state_nHkv = state_nHkv + key_nHk.unsqueeze(-1) * change_nHv.unsqueeze(2)
        read.append((state_nHkv * query_nHk.unsqueeze(-1)).sum(2))
        for n, to in ends[done]:
            pool[to] = state_nHkv[place[n]].detach()
    return torch.cat(read).index_select(0, by_position.argsort())


def _by_position(lengths: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the tokens at the first position of every sequence, at the second, ..., and their number at each."""
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    counts = [sum(length > position for length in lengths) for position in range(max(lengths))]
    tokens = [starts[n] + position for position, count in enumerate(counts) for n in order[:count]]
    return tokens, counts
