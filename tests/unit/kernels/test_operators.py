"""Rules that hold for every operator, over the cases of `tests.operators`: names, schemas, results, rows."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from rollout.kernels.build import SOURCES
from rollout.kernels.operator import Operator
from rollout.kernels.operators import OPERATORS
from rollout.kernels.ops import Ops, plain_ops
from tests.kernels import error, native_ops, rows_are_independent
from tests.operators import T, all_cases, as_stored, copies, module_of, name_of

PLAIN = plain_ops()
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.fixture(scope="module")
def native() -> Ops:
    return native_ops()


def test_plain_torch_stands_behind_every_schema() -> None:
    """The registry has the plain forms where nothing is compiled, as with --disable-native-kernels."""
    code = """
import torch
from rollout.kernels.operators import OPERATORS
from tests.operators import T, all_cases, copies, name_of
assert not hasattr(torch.ops.lockstep, "isa")
cases = {case: copies(given, torch.float32) for case, given in all_cases().items()}
assert {name_of(case) for case in cases} == OPERATORS.keys()
for case, given in cases.items():
    one = OPERATORS[name_of(case)]
    got, want = one.registered(*copies(given).values()), one.plain(*copies(given).values())
    for ours, theirs in zip(got, want) if isinstance(got, tuple) else [(got, want)]:
        assert torch.equal(ours, theirs), case
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("one", OPERATORS.values(), ids=lambda one: one.name)
def test_schemas_have_the_arguments_of_plain_forms(one: Operator) -> None:
    """They have the same names, order and defaults; the fields of a rule stand in its place, without defaults."""
    fields = [] if one.rule is None else list(inspect.signature(one.rule).parameters)
    wanted = {name: default for name, default in one.parameters.items() if name != "rule"}
    declared = getattr(torch.ops.lockstep, one.name).default._schema.arguments
    at = list(one.parameters).index("rule") if fields else 0
    assert [argument.name for argument in declared[at : at + len(fields)]] == fields
    rest = [*declared[:at], *declared[at + len(fields) :]]
    assert [argument.name for argument in rest] == list(wanted)
    given = {argument.name: argument.default_value for argument in rest if argument.has_default_value()}
    assert given == {name: value for name, value in wanted.items() if value is not inspect.Parameter.empty}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_a_source_of_its_name(name: str) -> None:
    assert f'm.impl("{name}", &lockstep::{name})' in (SOURCES / f"{name}.cpp").read_text()


def _floats(case: str, ops: Ops, dtype: torch.dtype) -> list[torch.Tensor]:
    """Run a case, and return its floating-point results and the rows that it stores in float64."""
    arguments = as_stored(case, ops, copies(all_cases()[case], dtype))
    result = getattr(ops, name_of(case))(*arguments.values())
    gradient = OPERATORS[name_of(case)].gradient
    written = [] if gradient is None else [arguments[name] for name in gradient.pools]
    results = [*(result if isinstance(result, tuple) else [result]), *written]
    return [value.double() for value in results if value.is_floating_point()]


@DTYPES
@pytest.mark.parametrize("case", all_cases())
def test_compiled_operators_are_as_near_as_plain_torch(native: Ops, case: str, dtype: torch.dtype) -> None:
    exact = _floats(case, PLAIN, torch.float64)
    for ours, theirs, right in zip(_floats(case, native, dtype), _floats(case, PLAIN, dtype), exact, strict=True):
        assert ours.shape == right.shape
        assert error(ours, right) <= 1.3 * error(theirs, right) + 0.5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (3, 0), (4, 9, 37), (16, 5000)], ids=str)
def test_sums_over_ranks_have_the_bits_of_plain_torch(native: Ops, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Ranks sum numbers of all these dtypes.  Counts are integers, and some are beyond the integers of a float."""
    parts = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2.0**40
    parts = (parts if dtype == torch.int64 else parts / 2.0**40).to(dtype)
    assert torch.equal(native.sum_in_order(parts), PLAIN.sum_in_order(parts))


def _has_pools(case: str) -> bool:
    gradient = OPERATORS[name_of(case)].gradient
    return gradient is not None and bool(gradient.pools)


@DTYPES
@pytest.mark.parametrize("case", [case for case in all_cases() if not _has_pools(case)])
def test_rows_of_every_operator_are_independent(native: Ops, case: str, dtype: torch.dtype) -> None:
    """Tensors of a case with one row a token have T rows.  Operators with pools have tests of their own."""
    arguments = as_stored(case, native, copies(all_cases()[case], dtype))
    axis = getattr(module_of(name_of(case)), "TOKEN_AXIS", 0)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        of_rows = [
            x.index_select(axis, rows) if isinstance(x, torch.Tensor) and x.dim() > axis and x.shape[axis] == T else x
            for x in arguments.values()
        ]
        result = getattr(native, name_of(case))(*of_rows)
        return torch.cat([x.double() for x in (result if isinstance(result, tuple) else (result,))], dim=1)

    assert rows_are_independent(compute, T)
