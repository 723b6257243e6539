"""`--enable-deterministic-inference`: the parts that give a token the same bits in every batch, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.distributed.communicator import Communicator
from rollout.memory.kv_pool import KVPool


def attention_name(args: ServerArgs, device: torch.device) -> str:
    """Return the attention backend to create: on CUDA the one with fixed splits, unless another was named."""
    is_free = args.attention_backend == "auto" and device.type == "cuda"
    return "fixed_splits" if args.enable_deterministic_inference and is_free else args.attention_backend


def batch_invariance(
    parts: Mapping[str, bool], reason: str, kv_pool: KVPool, order_of_sums: str | None = None
) -> dict[str, Any]:
    """Return the fields `batch_invariant` and `batch_invariance_note` of /server_info.

    `parts` states of each part whether it gives a token the same bits in every batch, chunking and number of threads.
    `reason`: why the device's kernels are not loaded, if so.  `order_of_sums`: why sums over ranks depend on the batch.
    """
    failing = " and ".join(name for name, holds in parts.items() if not holds)
    device, sizes = kv_pool.k[0].device.type, " and ".join(sorted({str(k.shape[2]) for k in kv_pool.k if k.numel()}))
    if not reason and device == "cuda":
        where = "on the libraries of a GPU"
        reason = "they add in another order for another batch; --enable-deterministic-inference takes other kernels"
    else:
        where, reason = "on plain torch", reason or f"no compiled operator for {kv_pool.dtype} with heads of {sizes}"
    notes = [f"{failing} {where}: {reason}"] if failing else []
    notes += [order_of_sums] if order_of_sums is not None else []
    return {"batch_invariant": not notes, "batch_invariance_note": "; ".join(notes)}


def check_deterministic(args: ServerArgs, state: Mapping[str, Any], ranks: Communicator) -> None:
    """Raise `StartupError` on all ranks together where batch invariance is wanted, and one of them lacks it.

    `state` has the fields of `batch_invariance`.
    """
    if args.enable_deterministic_inference and not ranks.all_agree(state["batch_invariant"]):
        reason = state["batch_invariance_note"] or "another rank of the engine cannot"
        raise StartupError(f"--enable-deterministic-inference: a token's bits would depend on its batch: {reason}")
