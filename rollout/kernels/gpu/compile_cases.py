"""`CompileCase`: one way in which a Triton kernel is compiled, for the table of all of them.

Every module of this package that has kernels exports `compile_cases() -> list[CompileCase]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class CompileCase(NamedTuple):
    """`signature` names the type of every argument ("*bf16", "i32", "fp32", "constexpr"), as `triton.compiler.ASTSource`
    takes it; `constexprs` the values of those of type "constexpr"."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
