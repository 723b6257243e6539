"""Compile keys of kernels are few: steps of ever new sizes share their kernels.

Keys are Triton's own, for a device of compute capability 9.0.  No kernel runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.interpreted import kernels, mutated

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
STEPS = 2000


class Recorded:
    """A kernel that notes the compile key of each launch, and does nothing else."""

    def __init__(self, kernel: Any, keys: set[str]) -> None:
        compiled = JITFunction(kernel.fn, do_not_specialize=kernel.kwargs["do_not_specialize"])
        self.name, self.keys = compiled.fn.__name__, keys
        self.bind = create_function_from_signature(compiled.signature, compiled.params, BACKEND)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **kwargs: Any) -> None:
        _, specialisation, options = self.bind(*args, **kwargs)
        self.keys.add(f"{self.name} {specialisation} {options}")


def recorded(module: Any, patch: pytest.MonkeyPatch) -> set[str]:
    """Put a `Recorded` in the place of each kernel of `module` that is launched, and return the keys to come."""
    keys: set[str] = set()
    for name, value in vars(module).copy().items():
        if isinstance(value, InterpretedFunction) and name.endswith("_kernel"):
            patch.setattr(module, name, Recorded(value, keys))
    return keys


def gated_delta_keys(module: Any, patch: pytest.MonkeyPatch) -> set[str]:
    """Return the keys of steps with 0 to 128 decoding tokens and 1 to 8 prompts."""
    keys, draw = recorded(module, patch), random.Random(0)
    heads, size, channels = 4, 16, 2 * 2 * 16 + 4 * 16
    weights = [torch.empty(0) for _ in range(4)]
    pools = torch.empty(2, 3, channels), torch.empty(2, heads, size, size)
    for _ in range(STEPS):
        decoding, prompts = draw.randint(0, 128), draw.randint(1, 8)
        num_tokens, count = decoding + sum(draw.randint(16, 1024) for _ in range(prompts)), decoding + prompts
        projected = torch.empty(num_tokens, channels + heads * size + 2 * heads, device="meta")
        tables = [torch.empty(count, dtype=torch.int64) for _ in range(3)]
        snapshots = torch.empty(draw.randint(0, 2 * prompts), 3, dtype=torch.int64)
        module.gated_delta(projected, *weights, 1e-6, *pools, *tables, snapshots)
    return keys


def test_steps_of_hybrid_models_compile_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lengths lie in vectors of two sizes: a key of the convolution each.  The inputs are kept with and without
    # snapshots, and the recurrence has snapshots or none.  The norm has one key.
    keys = gated_delta_keys(kernels("gated_delta"), monkeypatch)
    assert len(keys) == 2 + 2 * 2 + 2 * 2 + 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('@triton.jit(do_not_specialize=["num_sequences", "num_snapshots"])', "@triton.jit"),
        ("    num_snapshots,\n    HAS", "    num_snapshots: tl.constexpr,\n    HAS"),
    ],
)
def test_counts_in_compile_keys_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    module = mutated(kernels("gated_delta"), tmp_path, (old, new))
    assert len(gated_delta_keys(module, monkeypatch)) > 11


def test_numbers_of_sequences_and_tokens_are_not_in_the_keys_of_slots_and_latent_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, latent = kernels("gather_slots"), kernels("latent_heads")
    slot_keys, latent_keys = recorded(slots, monkeypatch), recorded(latent, monkeypatch)
    table, weight = torch.empty(64, dtype=torch.int64), torch.empty(4, 16, 32)
    for count in (1, 2, 15, 16, 17, 48):
        slots.gather_slots(table, torch.empty(3, count, dtype=torch.int64), 8, torch.empty(64, dtype=torch.int32))
        latent.head_products(torch.empty(count, 4, 16), weight, torch.empty(count, 4, 32))
    assert len(slot_keys) == len(latent_keys) == 1
