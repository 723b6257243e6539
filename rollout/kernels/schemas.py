"""The operators that models compute with: a schema each in torch's registry, and plain torch behind it on every device.

`torch.ops.lockstep.NAME` runs what torch's dispatcher finds for the device of its arguments: the compiled CPU kernel
where `load_kernels` loaded it, the Triton kernel where `load_gpu_kernels` did, else the function of `plain` of the same
name.

T tokens, D hidden, O output features, E logical experts, K top-k, I intermediate, H query heads, Hkv key/value heads,
hd head size, rd of it that is rotated, S slots of the KV pool; of latent attention R latent, v value size of a head.
"""

from __future__ import annotations

import torch

from rollout.kernels import plain

SCHEMAS = {
    # rows of a plain table [N, ...] by number [T]; raises `IndexError`
    "gather_rows": "(Tensor table, Tensor ids) -> Tensor",
    # rows of a stored matrix of `depth` columns by number [T]
    "matrix_rows": "(Tensor weight, Tensor ids, int depth) -> Tensor",
    # hidden @ weight.T + bias [T, O]
    "linear": "(Tensor hidden, Tensor weight, int out_size, Tensor? bias=None) -> Tensor",
    # residual += hidden, where there is one; its root mean square norm over D, rounded, then times the weight; with an
    # offset, times offset + weight in float32, then rounded
    "add_rms_norm": (
        "(Tensor(a!) residual, Tensor? hidden, Tensor weight, float eps, float? weight_offset=None) -> Tensor"
    ),
    # linear of add_rms_norm
    "norm_linear": (
        "(Tensor(a!) residual, Tensor? hidden, Tensor norm_weight, float eps, Tensor weight, int out_size, "
        "Tensor? bias=None, float? weight_offset=None) -> Tensor"
    ),
    # add_rms_norm [T, D]; of its router logits the weights [T, K] and logical ids [T, K] int64 of the best K experts,
    # best first.  Rows of `forced_ids` [T, K] that begin with a natural number take the place of the best K.
    "norm_route": (
        "(Tensor(a!) residual, Tensor? hidden, Tensor norm_weight, float eps, Tensor weight, int num_experts, "
        'int top_k, bool normalise, str scoring="softmax", float scaling=1.0, Tensor? correction_bias=None, '
        "int num_groups=1, int top_groups=1, Tensor? forced_ids=None, float? weight_offset=None, Tensor? bias=None) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    # queries and keys of qkv [T, (H + 2 Hkv) hd] normed by head where there is a weight [H + Hkv, hd], and rotated by
    # angles [T, 2, rd]; keys and values stored in their slots [T] of the pools [S, Hkv, hd]; the queries [T, H, hd]
    "qk_norm_rope_store": (
        "(Tensor qkv, Tensor? weight, Tensor angles, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slots, float eps, "
        "float? weight_offset=None) -> Tensor"
    ),
    # queries [T, H (nope + rd)] of latent attention as they meet latents: [T, H, R + rd], of each head the first part
    # times the stored matrix for keys, then the second rotated in pairs 2 i, 2 i + 1 by angles [T, 2, rd]; the latents
    # [T, R + rd], the first part normed, the second rotated, stored in their slots [T] of the pool [S, 1, R + rd]
    "latent_query_store": (
        "(Tensor query, Tensor latent, Tensor norm_weight, float eps, Tensor weight, int num_heads, Tensor angles, "
        "Tensor(a!) pool, Tensor slots) -> Tensor"
    ),
    # weighted means of latents [T, H R] times the stored matrix for values, by head: [T, H v]
    "latent_values": "(Tensor latents, Tensor weight, int num_heads, int value_size) -> Tensor",
    # silu(gate) * up [T, I] of [T, 2I], gate first, silu(gate) rounded
    "silu_and_mul": "(Tensor gate_up) -> Tensor",
    # SwiGLU of expert ids[t, k] on row t [T, K, D], or with weights [T, K] their sum over K in slot order [T, D].
    # Biases w13_bias [P, 2I], gate first, and w2_bias [P, D].  With a limit, ClampedSwiGLU.  An id of -1 is a slot
    # without an expert where `Ops.takes_empty_slots` says so: its output is zero, its weight is not used.
    "fused_experts": (
        "(Tensor hidden, Tensor ids, Tensor? weights, Tensor w13, Tensor w2, int inner_size, "
        "Tensor? w13_bias=None, Tensor? w2_bias=None, float? limit=None, float alpha=1.0) -> Tensor"
    ),
    # hidden [T, N] in groups of N / G neighbours, each times the sigmoid of its gate [T, G], which is rounded
    "sigmoid_gate": "(Tensor hidden, Tensor gate) -> Tensor",
    # The gated delta rule over the sequences of a step, from projections [T, C + Hv dv + 2 Hv] of mixed queries, keys
    # and values, output gates, b and a, to values read from the states, normed and gated [T, Hv dv].  C = 2 Hk dk +
    # Hv dv.  The convolution has a weight [w, C]; inputs of it before a token are in the pool [R, w - 1, C], states in
    # that [R, Hv, dk, dv].  Sequence n has query_lens[n] tokens, begins from the row sources[n], or from zeros where
    # that is negative, and ends in rows[n]; `snapshots` [M, 3] are (n, tokens of the step, row): copies on the way.
    # No row is written that another sequence of the step begins from.
    "gated_delta": (
        "(Tensor projected, Tensor conv_weight, Tensor a_log, Tensor dt_bias, Tensor norm_weight, float eps, "
        "Tensor(a!) conv_pool, Tensor(b!) state_pool, Tensor query_lens, Tensor rows, Tensor sources, "
        "Tensor snapshots) -> Tensor"
    ),
}

_LIBRARY = torch.library.Library("lockstep", "FRAGMENT")

for _name, _schema in SCHEMAS.items():
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, getattr(plain, _name), "CompositeExplicitAutograd")
