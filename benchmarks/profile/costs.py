"""The bytes and flops that one call of an operator needs, from its arguments: a table by operator name.

Bytes are the least there is: each read and each write counts once.  Of gathered rows and of experts, only the used ones
count.  Flops count matrix products (a product and a sum are two); operators without one are bound by bytes.

Shapes: T tokens, D hidden, P physical experts, K top-k, H query heads, hd head size, N requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

Arguments = Mapping[str, Any]  # every argument of a call by its name in the schema


@dataclass(frozen=True)
class Cost:
    """Bytes moved and floating-point operations of one call; `dtype` is the one that the products are made of."""

    bytes_moved: int
    flops: int
    dtype: torch.dtype


def operator_cost(operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> Cost:
    """Return the cost of the call `operator(*args, **kwargs)` that gave `result`.

    An operator without entries of its own reads every tensor that it is given, and writes every tensor that it returns
    or changes.  Its flops are counted by torch's own counter.
    """
    arguments = _bind(operator, args, kwargs)
    name = operator._schema.name
    if name in BYTES:
        bytes_moved = BYTES[name](arguments, result)
    else:
        bytes_moved = _generic_bytes(operator, arguments, result)
    if name in FLOPS:
        flops = FLOPS[name](arguments, result)
    else:
        flops = _torch_flops(operator, args, kwargs, result)
    return Cost(bytes_moved, flops, _float_dtype(arguments))


def nbytes(*values: object) -> int:
    """Return the bytes of every tensor among `values`, lists included, once."""
    return sum(tensor.nbytes for tensor in _tensors(values))


# --- the engine's operators --------------------------------------------------------------------------------------


def _linear_flops(arguments: Arguments, result: object) -> int:
    """Count the product that takes [T, D] to `out_size` features."""
    flops: int = 2 * _token_rows(arguments).numel() * arguments["out_size"]
    return flops


def _route_flops(arguments: Arguments, result: object) -> int:
    """Count the product that takes [T, D] to `num_experts` logits."""
    flops: int = 2 * _token_rows(arguments).numel() * arguments["num_experts"]
    return flops


def _token_rows(arguments: Arguments) -> torch.Tensor:
    """Return the rows; with a norm before the operator, the residual has them."""
    rows: torch.Tensor = arguments["residual"] if "residual" in arguments else arguments["hidden"]
    return rows


def _filled(arguments: Arguments) -> torch.Tensor:
    """Return which slots of `ids` have an expert of this rank [T, K]: their ids are of those stored."""
    ids: torch.Tensor = arguments["ids"]
    experts: int = arguments["w13"].shape[0]
    return (ids >= 0) & (ids < experts)


def _experts_bytes(arguments: Arguments, result: object) -> int:
    """Count the experts in `ids`, of `w13`, `w2` and their biases [P, ...], and the activations."""
    held = [arguments.get(name) for name in ("w13", "w2", "w13_bias", "w2_bias")]
    used: int = arguments["ids"][_filled(arguments)].unique().numel()
    activations = nbytes(arguments["hidden"], arguments["ids"], arguments["weights"], result)
    experts: int = arguments["w13"].shape[0]
    return used * (nbytes(*held) // experts) + activations


def _experts_flops(arguments: Arguments, result: object) -> int:
    """Count three products of D * `inner_size` for every (token, slot) pair of `ids` [T, K] that has an expert."""
    hidden_size = arguments["hidden"].shape[1]
    flops: int = 2 * int(_filled(arguments).sum()) * 3 * hidden_size * arguments["inner_size"]
    return flops


def _adapted_ranks(arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts and slots [N, 2] of the rows with an adapter, and their ranks of gate, up and down [N, 3]."""
    slots_TK = arguments["slots"].unsqueeze(1).expand_as(arguments["ids"])
    pairs_N2 = torch.stack((arguments["ids"], slots_TK), dim=-1)[_filled(arguments) & (slots_TK >= 0)]
    return pairs_N2, arguments["ranks"][pairs_N2[:, 0], pairs_N2[:, 1]]


def _adapted_bytes(arguments: Arguments, result: object) -> int:
    """Count `_experts_bytes`, and the ranks that adapters have, once for each expert and slot in use."""
    used = _adapted_ranks(arguments)[0].unique(dim=0)
    ranks = arguments["ranks"][used[:, 0], used[:, 1]]
    features = arguments["hidden"].shape[1] + arguments["inner_size"]
    adapters: int = int(ranks.sum()) * features * arguments["a13"].itemsize
    return _experts_bytes(arguments, result) + adapters


def _adapted_flops(arguments: Arguments, result: object) -> int:
    """Count `_experts_flops`, and two products for each rank of a row's adapter."""
    features = arguments["hidden"].shape[1] + arguments["inner_size"]
    adapters: int = 2 * int(_adapted_ranks(arguments)[1].sum()) * features
    return _experts_flops(arguments, result) + adapters


def _attention_bytes(arguments: Arguments, result: object) -> int:
    """Count the KV of a request once, for any number of queries: `kv_lens` [N] slots each, or a window of them."""
    keys, values = arguments["k_pool"], arguments["v_pool"]
    is_shared = keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    slot: int = nbytes(keys[0], None if is_shared else values[0]) + arguments["req_to_token"].itemsize
    kv_lens, window = arguments["kv_lens"], arguments.get("window")
    if window is not None:
        kv_lens = torch.minimum(kv_lens, arguments["query_lens"] + window - 1)
    positions = int(kv_lens.sum())
    return positions * slot + nbytes(*(arguments[name] for name in ("q", "rows", "query_lens", "kv_lens")), result)


def _attention_flops(arguments: Arguments, result: object) -> int:
    """Count the products of each row of `q` [T, H, hd] with the positions that it sees.

    Request n brings `query_lens[n]` rows, the last of which sees `kv_lens[n]` positions.
    """
    kv_lens, window = arguments["kv_lens"], arguments.get("window")

    def seen(length: torch.Tensor) -> torch.Tensor:
        """Return how many positions the first `length` positions see together."""
        within = length if window is None else length.clamp(max=window)
        return within * (within + 1) // 2 + (length - within) * within

    pairs = int((seen(kv_lens) - seen(kv_lens - arguments["query_lens"])).sum())
    flops: int = 2 * pairs * arguments["q"].shape[1] * (arguments["q"].shape[2] + arguments["v_pool"].shape[2])
    return flops


def _store_bytes(arguments: Arguments, result: object) -> int:
    """Count `qkv` as read and as written: its queries to the result, its keys and values to T slots of the pools."""
    others = (value for name, value in arguments.items() if name not in ("qkv", "k_pool", "v_pool"))
    return 2 * nbytes(arguments["qkv"]) + nbytes(*others)


def _latent_store_bytes(arguments: Arguments, result: object) -> int:
    """Count as many written rows of the pool as there are latents."""
    return nbytes(*(value for name, value in arguments.items() if name != "pool"), arguments["latent"], result)


def _latent_query_flops(arguments: Arguments, result: object) -> int:
    """Count the product of the first part of each head of [T, H (nope + rd)] with [nope, R], if there is one."""
    if arguments["weight"] is None:
        return 0
    query, rank = arguments["query"], arguments["norm_weight"].shape[0]
    rotated = arguments["num_heads"] * arguments["angles"].shape[-1]
    flops: int = 2 * query.shape[0] * (query.shape[1] - rotated) * rank
    return flops


def _latent_values_flops(arguments: Arguments, result: object) -> int:
    """Count the product of each head of [T, H R] with [R, v]."""
    flops: int = 2 * arguments["latents"].numel() * arguments["value_size"]
    return flops


def _lora_bytes(arguments: Arguments, result: object) -> int:
    """Count the adapters in `slots` once, of the ranks that they have: A and B of each part."""
    widths_P = torch.tensor(arguments["columns"]).diff() + arguments["a"].shape[2]
    return _adapter_bytes(arguments, arguments["ranks"] @ widths_P, result)


def _head_lora_bytes(arguments: Arguments, result: object) -> int:
    """Count the adapters in `slots` once, of the ranks that they have: A and B of each head, or one for all."""
    a, b = arguments["a"], arguments["b"]
    width = a.shape[1] * a.shape[2] + b.shape[1] * b.shape[3]
    return _adapter_bytes(arguments, arguments["ranks"].reshape(-1) * width, result)


def _adapter_bytes(arguments: Arguments, elements_S: torch.Tensor, result: object) -> int:
    slots = arguments["slots"]
    elements = int(elements_S[slots[slots >= 0].unique()].sum())
    activations = nbytes(arguments["out"], arguments["hidden"], slots, result)
    return elements * int(arguments["a"].itemsize) + activations


def _lora_flops(arguments: Arguments, result: object) -> int:
    """Count the products of each token's parts with A [D, rank], and with B [rank, the part's columns]."""
    slots, ranks = arguments["slots"], arguments["ranks"]
    widths_P = torch.tensor(arguments["columns"]).diff() + arguments["a"].shape[2]
    return 2 * int((ranks[slots[slots >= 0]] @ widths_P).sum())


def _head_lora_flops(arguments: Arguments, result: object) -> int:
    """Count the products of each token and head with A [D, rank] and B [rank, O]."""
    slots, ranks = arguments["slots"], arguments["ranks"].reshape(-1)
    width: int = arguments["a"].shape[2] + arguments["b"].shape[3]
    return 2 * int(ranks[slots[slots >= 0]].sum()) * int(arguments["num_heads"]) * width


def _delta_bytes(arguments: Arguments, result: object) -> int:
    """Count a state as read and written once a sequence, and as written once a snapshot."""
    pools = (arguments["conv_pool"], arguments["state_pool"])
    row: int = sum(pool[0].nbytes for pool in pools)
    copies: int = 2 * arguments["rows"].numel() + arguments["snapshots"].shape[0]
    return copies * row + nbytes(*(value for name, value in arguments.items() if "pool" not in name), result)


def _delta_flops(arguments: Arguments, result: object) -> int:
    """Count that a token decays a state [dk, dv], reads it twice and adds to it, in each of H heads."""
    heads, key_dim, value_dim = arguments["state_pool"].shape[1:]
    flops: int = 7 * arguments["projected"].shape[0] * heads * key_dim * value_dim
    return flops


# --- operators that touch a part of their arguments ---------------------------------------------------------------


def _gather_bytes(arguments: Arguments, result: object) -> int:
    """Count as much read of the first argument as is written to the result."""
    _, *others = arguments.values()
    return nbytes(*others) + 2 * nbytes(result)


def _scatter_bytes(arguments: Arguments, result: object) -> int:
    """Count the source as read and written; the rest of the target is left alone."""
    _, *others = arguments.values()
    source = next(arguments[name] for name in ("values", "source", "src") if name in arguments)
    return nbytes(*others, source)


def _overwrite_bytes(arguments: Arguments, result: object) -> int:
    """Count the target as written and not read."""
    return nbytes(*arguments.values())


def _no_bytes(arguments: Arguments, result: object) -> int:
    return 0


Count = Callable[[Arguments, object], int]  # from the arguments and the result of a call

BYTES: Mapping[str, Count] = {
    "lockstep::adapted_experts": _adapted_bytes,
    "lockstep::add_head_lora": _head_lora_bytes,
    "lockstep::add_lora": _lora_bytes,
    "lockstep::fused_experts": _experts_bytes,
    "lockstep::matrix_rows": _gather_bytes,
    "lockstep::gather_rows": _gather_bytes,
    "lockstep::gated_delta": _delta_bytes,
    "lockstep::latent_query_store": _latent_store_bytes,
    "lockstep::paged_attention": _attention_bytes,
    "lockstep::qk_norm_rope_store": _store_bytes,
    "aten::embedding": _gather_bytes,
    "aten::gather": _gather_bytes,
    "aten::index": _gather_bytes,
    "aten::index_select": _gather_bytes,
    "aten::index_copy_": _scatter_bytes,
    "aten::index_put_": _scatter_bytes,
    "aten::scatter_": _scatter_bytes,
    "aten::copy_": _overwrite_bytes,
    "aten::fill_": _overwrite_bytes,
    "aten::zero_": _overwrite_bytes,
    "aten::empty": _no_bytes,
    "aten::empty_like": _no_bytes,
    "aten::new_empty": _no_bytes,
}
FLOPS: Mapping[str, Count] = {
    "lockstep::adapted_experts": _adapted_flops,
    "lockstep::add_head_lora": _head_lora_flops,
    "lockstep::add_lora": _lora_flops,
    "lockstep::fused_experts": _experts_flops,
    "lockstep::linear": _linear_flops,
    "lockstep::norm_linear": _linear_flops,
    "lockstep::norm_route": _route_flops,
    "lockstep::gated_delta": _delta_flops,
    "lockstep::latent_query_store": _latent_query_flops,
    "lockstep::latent_values": _latent_values_flops,
    "lockstep::paged_attention": _attention_flops,
}


# --- any operator -------------------------------------------------------------------------------------------------


def _bind(operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in operator._schema.arguments]
    return dict(zip(names, args)) | dict(kwargs)


def _generic_bytes(operator: OpOverload, arguments: Arguments, result: object) -> int:
    """Count nothing for a view, and a tensor that is changed as read and written."""
    schema = operator._schema
    returned = [value.alias_info for value in schema.returns]
    if any(alias is not None and not alias.is_write for alias in returned):
        return 0
    changed = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    written = [value for name, value in arguments.items() if name in changed]
    fresh = None if any(alias is not None for alias in returned) else result
    return nbytes(*arguments.values(), *written, fresh)


def _torch_flops(operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> int:
    count = flop_registry.get(operator.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _float_dtype(arguments: Arguments) -> torch.dtype:
    """Return the dtype of the first floating-point tensor; float32 if there is none."""
    floats = (tensor.dtype for tensor in _tensors(arguments.values()) if tensor.is_floating_point())
    return next(floats, torch.float32)


def _tensors(values: Iterable[object]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
