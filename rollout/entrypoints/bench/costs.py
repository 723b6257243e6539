"""What one call of an operator has to move and to compute, from its arguments: a table by operator name.

Bytes are the least there is: what is read is counted once, what is written once, of gathered rows and of experts only
those that this call uses.  Flops are those of matrix products (a product and a sum are two); operators without one are
bound by bytes.  Knows no time and no machine.

Shapes: T tokens, D hidden, O output features, P physical experts, K top-k, H query heads, Hkv key/value heads,
hd head size, N requests.
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


def operator_cost(operator: OpOverload, args: tuple, kwargs: Mapping[str, Any], result: object) -> Cost:
    """Cost of the call `operator(*args, **kwargs)` that gave `result`.

    An operator without an entry of its own reads every tensor that it is given, writes every tensor that it returns or
    changes, and computes what torch's own flop counter says.
    """
    arguments = _bind(operator, args, kwargs)
    function = COSTS.get(operator._schema.name)
    if function is not None:
        bytes_moved, flops = function(arguments, result)
    else:
        bytes_moved, flops = _generic_bytes(operator, arguments, result), _torch_flops(operator, args, kwargs, result)
    return Cost(bytes_moved, flops, _float_dtype(arguments))


def generic_bytes(arguments: Arguments, result: object) -> int:
    """Every tensor given and returned, once."""
    return sum(tensor.nbytes for tensor in (*_tensors(arguments.values()), *_tensors([result])))


# --- the engine's operators --------------------------------------------------------------------------------------


def _linear(arguments: Arguments, result: object) -> tuple[int, int]:
    """`hidden` [T, D] to the result [T, O]."""
    assert isinstance(result, torch.Tensor)
    return generic_bytes(arguments, result), 2 * arguments["hidden"].numel() * result.shape[1]


def _fused_experts(arguments: Arguments, result: object) -> tuple[int, int]:
    """Of `w13` and `w2` [P, ...], the experts that occur in `ids` [T, K]; every (token, slot) pair is one expert."""
    ids, w13, w2 = arguments["ids"], arguments["w13"], arguments["w2"]
    used = ids.unique().numel()
    num_experts = w13.shape[0]
    weights = (w13.nbytes + w2.nbytes) // num_experts
    others = generic_bytes({name: arguments[name] for name in ("hidden", "ids", "weights")}, result)
    return used * weights + others, 2 * ids.numel() * (w13.numel() + w2.numel()) // num_experts


def _paged_attention(arguments: Arguments, result: object) -> tuple[int, int]:
    """`q` [T, H, hd]: request n brings `query_lens[n]` rows, the last of which sees `kv_lens[n]` positions.

    The KV of a request is read once, whatever the number of its queries.
    """
    q, k_pool, v_pool = arguments["q"], arguments["k_pool"], arguments["v_pool"]
    query_lens, kv_lens = arguments["query_lens"], arguments["kv_lens"]
    positions = int(kv_lens.sum())
    pairs = int((query_lens * kv_lens - query_lens * (query_lens - 1) // 2).sum())
    slot = k_pool[0].nbytes + v_pool[0].nbytes + arguments["req_to_token"].itemsize
    lengths = generic_bytes({name: arguments[name] for name in ("q", "rows", "query_lens", "kv_lens")}, result)
    return positions * slot + lengths, 4 * pairs * q.shape[1] * q.shape[2]


def _qk_norm_rope_store(arguments: Arguments, result: object) -> tuple[int, int]:
    """`qkv` is read, and as many bytes written: queries to the result, keys and values to T slots of the pools."""
    names = ("weight", "cos", "signed_sin", "slots")
    return 2 * arguments["qkv"].nbytes + generic_bytes({name: arguments[name] for name in names}, None), 0


# --- torch's operators that touch a part of what they are given ---------------------------------------------------


def _gather(arguments: Arguments, result: object) -> tuple[int, int]:
    """Rows of the table are read as often as they are written to the result."""
    table = arguments["weight"] if "weight" in arguments else arguments["self"]
    others = {name: value for name, value in arguments.items() if value is not table}
    return generic_bytes(others, None) + 2 * generic_bytes({}, result), 0


def _scatter(arguments: Arguments, result: object) -> tuple[int, int]:
    """What is put is read and written; the rest of the target is left alone."""
    source = next(arguments[name] for name in ("values", "source", "src") if name in arguments)
    others = {name: value for name, value in arguments.items() if name != "self"}
    return generic_bytes(others, source), 0


def _overwrite(arguments: Arguments, result: object) -> tuple[int, int]:
    """The target is written and not read."""
    return generic_bytes(arguments, None), 0


def _nothing(arguments: Arguments, result: object) -> tuple[int, int]:
    return 0, 0


COSTS: dict[str, Callable[[Arguments, object], tuple[int, int]]] = {
    "lockstep::linear": _linear,
    "lockstep::fused_experts": _fused_experts,
    "lockstep::paged_attention": _paged_attention,
    "lockstep::qk_norm_rope_store": _qk_norm_rope_store,
    "aten::embedding": _gather,
    "aten::gather": _gather,
    "aten::index": _gather,
    "aten::index_select": _gather,
    "aten::index_copy_": _scatter,
    "aten::index_put_": _scatter,
    "aten::scatter_": _scatter,
    "aten::copy_": _overwrite,
    "aten::fill_": _overwrite,
    "aten::zero_": _overwrite,
    "aten::empty": _nothing,
    "aten::empty_like": _nothing,
    "aten::new_empty": _nothing,
}


# --- any operator -------------------------------------------------------------------------------------------------


def _bind(operator: OpOverload, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in operator._schema.arguments]
    return dict(zip(names, args)) | dict(kwargs)


def _generic_bytes(operator: OpOverload, arguments: Arguments, result: object) -> int:
    """A view moves nothing; a tensor that is changed is read and written."""
    schema = operator._schema
    returned = [value.alias_info for value in schema.returns]
    if any(alias is not None and not alias.is_write for alias in returned):
        return 0
    changed = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    written = [arguments[name] for name in changed if name in arguments]
    fresh = [] if any(alias is not None for alias in returned) else result
    return generic_bytes(arguments, fresh) + generic_bytes({}, written)


def _torch_flops(operator: OpOverload, args: tuple, kwargs: Mapping[str, Any], result: object) -> int:
    count = flop_registry.get(operator.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _float_dtype(arguments: Arguments) -> torch.dtype:
    """Of the first floating-point tensor; float32 where there is none."""
    floats = (tensor.dtype for tensor in _tensors(arguments.values()) if tensor.is_floating_point())
    return next(floats, torch.float32)


def _tensors(values: Iterable[object]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
