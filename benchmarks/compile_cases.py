"""Configurations of Triton kernels: every one can be compiled on a machine without a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = 90  # compute capability of the H100 and the H200
_ALIGNMENT = 16  # bytes; torch's allocator gives at least that


class CompileCase(NamedTuple):
    """One configuration of one kernel.

    `signature`: the type of each argument that is not constant, as Triton writes it ("*bf16", "i32", "fp32");
    `constexprs`: the constants among its arguments.
    """

    name: str
    kernel: Any  # what `triton.jit` returned
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int


def compile_for(case: CompileCase, capability: int = HOPPER) -> Any:
    """Return the compiled kernel (`asm["ptx"]`, `metadata.shared`).  It takes Triton's own compiler, and no device.

    Pointers count as aligned to 16 bytes, as whole tensors are.  Products and sums are not fused.
    """
    types = _in_order(case)
    pointers = [index for index, kind in enumerate(types.values()) if kind.startswith("*")]
    aligned = {(index,): [["tt.divisibility", _ALIGNMENT]] for index in pointers}
    source = ASTSource(case.kernel, types, case.constexprs, aligned)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _in_order(case: CompileCase) -> dict[str, str]:
    """Return the types of all arguments, in the kernel's order."""
    given = case.signature | dict.fromkeys(case.constexprs, "constexpr")
    names = case.kernel.arg_names
    assert given.keys() == set(names), f"{case.name}: {sorted(given.keys() ^ set(names))}"
    return {name: given[name] for name in names}
