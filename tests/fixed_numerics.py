"""Engines on the kernels of `--enable-deterministic-inference`, interpreted on the CPU.

Only what asks for a device is replaced: how operators, attention and sampler are chosen.  Products in the interpreter
are numpy's, whose bits depend on the place of a row.  Here each element is one sum in one order, as on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from rollout.attention.fixed_splits import FixedSplitsBackend
from rollout.attention.registry import ATTENTION_BACKENDS
from rollout.engine import build, load_kernels
from rollout.kernels.build import KernelStatus
from rollout.kernels.ops import Ops
from rollout.memory.kv_pool import KVPool
from rollout.numerics import checks, logprobs
from rollout.sampling.invariant_sampler import InvariantGpuSampler
from tests.interpreted import interpreted_ops, kernels

SETTINGS: dict[str, Any] = {"attention_backend": "fixed_splits", "enable_deterministic_inference": True}
SPLIT = 32  # positions: sequences of tests have several splits
MASK_LIMIT = 4096


class OnInterpreter(FixedSplitsBackend):
    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        return None


def deterministic_ops() -> Ops:
    """Return what `gpu_ops(deterministic=True)` returns, interpreted."""
    fixed = kernels("fixed_product")
    return interpreted_ops().replace(
        linear=fixed.linear, norm_linear=fixed.norm_linear, add_gated=_add_gated, batch_invariant=True
    )


def _add_gated(hidden: torch.Tensor, added: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `add_gated` of each element alone, as a device does: torch's sigmoid on a CPU takes some together."""
    if gate is None:
        return hidden + added
    return (hidden.double() + added.double() * gate.double().sigmoid()).to(hidden.dtype)


def _dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    product = np.einsum("mk,kn->mn", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


@contextmanager
def fixed_numerics() -> Iterator[pytest.MonkeyPatch]:
    """Let engines, models and log-probabilities made inside compute with these kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        patch.setattr(kernels("fixed_attention"), "SPLIT", SPLIT)
        patch.setitem(ATTENTION_BACKENDS, "fixed_splits", (__name__, "OnInterpreter"))
        patch.setitem(ATTENTION_BACKENDS, "native_cpu", (__name__, "OnInterpreter"))  # the first that "auto" tries
        for module in ("rollout.engine.build", "rollout.numerics.engine"):
            patch.setattr(f"{module}.select_ops", lambda *_, **__: deterministic_ops())
        for module in (build, logprobs):
            patch.setattr(module, "select_sampler", lambda *_, **__: InvariantGpuSampler(MASK_LIMIT))
        patch.setattr(build, "RecordedForward", lambda model: None)  # it records torch's operators
        for owner in (load_kernels, checks):
            patch.setattr(owner, "load_kernels", lambda *_: KernelStatus(available=True))
        yield patch
