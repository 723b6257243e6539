"""Norms, rotary embedding, activations of the GPU path, interpreted on the CPU; their entries in torch's registry.

Judged by plain torch in float64.  bfloat16 is left out: triton's interpreter computes it wrongly.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.kernels.gpu import register
from rollout.kernels.operators import OPERATORS
from rollout.kernels.ops import RowMajor, plain_ops, select_ops
from rollout.sampling.base import PlainRows, PlainTokens
from rollout.sampling.torch_sampler import TorchSampler
from tests import interpreted
from tests.interpreted import kernels
from tests.kernels import error, rows_are_independent
from tests.operators import all_cases, copies, name_of

norm, norm_linear, rotary, silu, gate, sums = map(
    kernels, ("add_rms_norm", "norm_linear", "qk_norm_rope_store", "silu_and_mul", "sigmoid_gate", "sum_in_order")
)

plain = plain_ops()
ROOT = Path(__file__).resolve().parents[3]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.5e-3}
OFFSETS = pytest.mark.parametrize("offset", [None, 1.0])
CASES = {
    "add_rms_norm": (norm.add_rms_norm, plain.add_rms_norm),
    "norm_linear": (norm_linear.norm_linear, plain.norm_linear),
    "qk_norm_rope_store": (rotary.qk_norm_rope_store, plain.qk_norm_rope_store),
    "silu_and_mul": (silu.silu_and_mul, plain.silu_and_mul),
    "sigmoid_gate": (gate.sigmoid_gate, plain.sigmoid_gate),
    "sum_in_order": (sums.sum_in_order, plain.sum_in_order),
}


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _copies(arguments: tuple[Any, ...], dtype: torch.dtype | None = None) -> list[Any]:
    """Return clones of the tensors, floating-point ones in `dtype`, and other arguments as they are."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(dtype, copy=True) if dtype and value.is_floating_point() else value.clone()

    return [copy(value) for value in arguments]


def worst_error(operator: Callable[..., torch.Tensor], name: str, *arguments: Any) -> float:
    """Return the worst error of the result and of the arguments after the call, against plain torch in float64."""
    mine, exact = _copies(arguments), _copies(arguments, torch.float64)
    pairs = [(operator(*mine), CASES[name][1](*exact))]
    pairs += [(a, b) for a, b in zip(mine, exact) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    for got, expected in pairs:
        assert got.shape == expected.shape
    return max(error(got, expected) for got, expected in pairs if expected.any())


@DTYPES
@OFFSETS
@pytest.mark.parametrize("size", [1, 33, 256])
def test_norms_agree_with_float64(dtype: torch.dtype, offset: float | None, size: int) -> None:
    residual, hidden, weight = (_randn(5, size, seed=i, dtype=dtype) for i in range(3))
    for added in (None, hidden):
        arguments = (residual, added, weight[0], 1e-6, offset)
        assert worst_error(norm.add_rms_norm, "add_rms_norm", *arguments) < TOLERANCE[dtype]
        product = (*arguments[:4], _randn(7, size, seed=9, dtype=dtype), 7, None, offset)
        assert worst_error(norm_linear.norm_linear, "norm_linear", *product) < 3 * TOLERANCE[dtype]


def test_rounding_is_that_of_plain_torch() -> None:
    """In float16 the results are equal bit by bit: a rounding in another place shows in every row."""
    residual, hidden, weight = (_randn(64, 48, seed=i, dtype=torch.float16) for i in range(3))
    for offset in (None, 1.0):
        mine, theirs = residual.clone(), residual.clone()
        got = norm.add_rms_norm(mine, hidden, weight[0], 1e-6, offset)
        assert torch.equal(got, plain.add_rms_norm(theirs, hidden, weight[0], 1e-6, offset))
        assert torch.equal(mine, theirs)
    assert torch.equal(silu.silu_and_mul(hidden), plain.silu_and_mul(hidden))
    assert torch.equal(gate.sigmoid_gate(hidden, residual[:, :6]), plain.sigmoid_gate(hidden, residual[:, :6]))


def _heads(dtype: torch.dtype, norms: bool, offset: float | None, head_dim: int = 24, rotated: int = 16) -> tuple:
    """Return arguments of `qk_norm_rope_store` for five tokens with 3 query heads and 2 key and value heads."""
    qkv, angles = _randn(5, 7 * head_dim, seed=3, dtype=dtype), _randn(5, 2, rotated, seed=4, dtype=dtype)
    pools = [torch.zeros(9, 2, head_dim, dtype=dtype) for _ in range(2)]
    weight = _randn(5, head_dim, seed=5, dtype=dtype) if norms else None
    return (qkv, weight, angles, *pools, torch.tensor([3, 8, 1, 0, 5]), 1e-6, offset)


@DTYPES
@OFFSETS
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize(("head_dim", "rotated"), [(24, 16), (16, 16), (40, 2)])
def test_heads_are_normed_rotated_and_stored(
    dtype: torch.dtype, offset: float | None, norms: bool, head_dim: int, rotated: int
) -> None:
    arguments = _heads(dtype, norms, offset, head_dim, rotated)
    assert worst_error(rotary.qk_norm_rope_store, "qk_norm_rope_store", *arguments) < TOLERANCE[dtype]


def test_pools_and_rows_that_lie_apart() -> None:
    """Keys and values of a slot share one memory, as in FlashInfer; slots of no token stay unchanged."""
    qkv, weight, angles, k_pool, _, slots, eps, offset = _heads(torch.float32, True, None)
    wide = torch.cat((qkv, qkv), dim=1)[:, : qkv.shape[1]]
    both = torch.full((9, 2, *k_pool.shape[1:]), torch.nan)
    query = rotary.qk_norm_rope_store(wide, weight, angles, both[:, 0], both[:, 1], slots, eps, offset)
    pools = [torch.full_like(k_pool, torch.nan) for _ in range(2)]
    expected = plain.qk_norm_rope_store(qkv, weight, angles, *pools, slots, eps, offset)
    torch.testing.assert_close(query, expected)
    torch.testing.assert_close(both, torch.stack(pools, 1), equal_nan=True)
    gated = _randn(4, 20)[:, 3:15]
    torch.testing.assert_close(silu.silu_and_mul(gated), plain.silu_and_mul(gated))
    torch.testing.assert_close(gate.sigmoid_gate(gated, gated[:, :4]), plain.sigmoid_gate(gated, gated[:, :4]))


@DTYPES
@pytest.mark.parametrize("inner", [1, 33, 1100])
def test_activations_agree_with_float64(dtype: torch.dtype, inner: int) -> None:
    gate_up = 4 * _randn(3, 2 * inner, dtype=dtype)
    assert worst_error(silu.silu_and_mul, "silu_and_mul", gate_up) < TOLERANCE[dtype]
    hidden = _randn(3, 4 * inner, seed=1, dtype=dtype)
    assert worst_error(gate.sigmoid_gate, "sigmoid_gate", hidden, _randn(3, 4, dtype=dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_sums_over_ranks_have_the_bits_of_plain_torch(dtype: torch.dtype, ranks: int) -> None:
    """A sum in another order, or one that is rounded at each part, has other bits."""
    parts = _randn(ranks, 3, 700, dtype=dtype) * 10.0 ** torch.arange(ranks).remainder(5).view(-1, 1, 1)
    for given in (parts.to(dtype), parts.to(dtype).flatten(1)[:, :1], parts.to(dtype)[:, :0]):
        assert torch.equal(sums.sum_in_order(given), plain.sum_in_order(given))
    if ranks > 2 and dtype == torch.float32:
        assert not torch.equal(sums.sum_in_order(parts.to(dtype)), plain.sum_in_order(parts.to(dtype).flip(0)))
    with pytest.raises(AssertionError):
        sums.sum_in_order(torch.ones(ranks, 3, dtype=torch.int32))


def test_operators_take_tensors_without_rows() -> None:
    nothing, weight = torch.empty(0, 24), torch.ones(24)
    assert norm.add_rms_norm(nothing, None, weight, 1e-6).shape == (0, 24)
    assert silu.silu_and_mul(nothing).shape == (0, 12)
    assert gate.sigmoid_gate(nothing, nothing[:, :2]).shape == (0, 24)
    qkv, weight, angles, *rest = _heads(torch.float32, True, None)
    assert rotary.qk_norm_rope_store(qkv[:0], weight, angles[:0], *rest).shape == (0, 3, 24)


def test_rows_do_not_depend_on_one_another() -> None:
    hidden, weight = _randn(9, 40), _randn(40, seed=1)
    qkv, head_weight, angles = _randn(9, 7 * 24, seed=3), _randn(5, 24, seed=4), _randn(9, 2, 16, seed=5)

    def heads(rows: torch.Tensor) -> torch.Tensor:
        pools = [torch.zeros(9, 2, 24) for _ in range(2)]
        query = rotary.qk_norm_rope_store(qkv[rows], head_weight, angles[rows], *pools, rows, 1e-6)
        return torch.cat((query.flatten(1), *(pool[rows].flatten(1) for pool in pools)), 1)

    assert rows_are_independent(heads, 9)
    assert rows_are_independent(lambda rows: norm.add_rms_norm(hidden[rows], hidden[rows], weight, 1e-6), 9)
    assert rows_are_independent(lambda rows: silu.silu_and_mul(hidden[rows]), 9)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("module", "name", "old", "new"),
    [
        (norm, "add_rms_norm", "tl.store(residual + row * residual_stride + at, x.to(dtype), mask=inside)", "pass"),
        (norm, "add_rms_norm", "sum_of_squares / size + eps", "sum_of_squares / size"),
        (norm, "add_rms_norm", "weight_offset + weight)", "weight)"),
        (norm, "add_rms_norm", "tl.sum(x * x, 0), D, eps", "tl.sum(x * x, 0), BLOCK_D, eps"),
        (rotary, "qk_norm_rope_store", "half = RD // 2", "half = HD // 2"),
        (rotary, "qk_norm_rope_store", "tl.where(at < half, at + half, at - half)", "at ^ 1"),
        (rotary, "qk_norm_rope_store", "(head - turned) * v_head_stride", "(turned + HKV - 1 - head) * v_head_stride"),
        (rotary, "qk_norm_rope_store", "    value = x\n", "    value = rounded(2 * x, dtype)\n"),
        (rotary, "qk_norm_rope_store", "tl.load(row + partner_at,", "tl.load(row + at,"),
        (silu, "silu_and_mul", "row * row_stride + I + at", "row * row_stride + I - 1 - at"),
        (gate, "sigmoid_gate", "at // GROUP_SIZE", "at % (N // GROUP_SIZE)"),
        (sums, "sum_in_order", "range(1, N, AT_ONCE)", "range(2, N, AT_ONCE)"),
        (sums, "sum_in_order", "from_part += size", "from_part += BLOCK"),
    ],
)  # fmt: skip
def test_wrong_kernels_are_caught(module: Any, name: str, old: str, new: str, tmp_path: Path) -> None:
    wrong = getattr(interpreted.mutated(module, tmp_path, (old, new)), name)
    arguments: dict[str, tuple[Any, ...]] = {
        "add_rms_norm": (_randn(5, 33), _randn(5, 33, seed=1), _randn(33, seed=2), 0.1, 1.0),
        "qk_norm_rope_store": _heads(torch.float32, True, None),
        "silu_and_mul": (_randn(5, 66),),
        "sigmoid_gate": (_randn(5, 66), _randn(5, 6, seed=1)),
        "sum_in_order": (_randn(5, 2, 66),),
    }
    assert worst_error(wrong, name, *arguments[name]) > 1e-3
    assert worst_error(CASES[name][0], name, *arguments[name]) < 1e-6


# --- the registry -----------------------------------------------------------------------------------------------------


def test_kernels_stand_in_the_registry_for_cuda() -> None:
    """The test runs in a process of its own, as the kernels of a dispatch key belong to the process."""
    code = """
import json, torch
from rollout.kernels.gpu import register
from rollout.kernels.operators import OPERATORS
has = lambda: [n for n in OPERATORS if torch._C._dispatch_has_kernel_for_dispatch_key(f"lockstep::{n}", "CUDA")]
before, status, again = has(), register.load_gpu_kernels(), register.load_gpu_kernels()
x = torch.randn(3, 8)
on_cpu = torch.equal(torch.ops.lockstep.silu_and_mul(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
print(json.dumps([before, has(), status.available, status is again, on_cpu]))
"""
    environment = interpreted.compiling_environment()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    before, after, *facts = json.loads(done.stdout)
    assert before == [] and set(after) == set(register.TRITON_OPERATORS) and facts == [True, True, True]


def test_a_missing_or_broken_triton_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    load = register.load_gpu_kernels.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(register, "find_spec", lambda name: None)
        assert load().reason == "triton is not installed: pip install triton"

    def fails(name: str) -> object:
        raise ImportError("libtriton.so: no such file")

    monkeypatch.setattr(register, "import_module", fails)
    status = load()
    assert not status.available and "libtriton.so" in status.reason


def test_triton_forms_take_what_plain_forms_take() -> None:
    """Both have the same names, order, types and defaults of arguments.

    Experts also take the number of rows that a rank expects, which the registry does not give.
    """
    for name in register.TRITON_OPERATORS:
        ours, theirs = inspect.signature(register.triton_form(name)), inspect.signature(OPERATORS[name].plain)
        more = {"expected"} if name in ("fused_experts", "adapted_experts") else set()
        assert more <= ours.parameters.keys(), name
        given = [one for one in ours.parameters.values() if one.name not in more]
        assert ours.replace(parameters=given) == theirs, name


def nested_targets(source: str) -> list[int]:
    """Return the lines of functions that triton compiles in which a tuple is assigned to a tuple with another in it."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    compiled = [node for node in functions if any("triton.jit" in ast.unparse(each) for each in node.decorator_list)]
    assigned = [node for function in compiled for node in ast.walk(function) if isinstance(node, ast.Assign)]
    tuples = [target for node in assigned for target in node.targets if isinstance(target, ast.Tuple)]
    return [target.lineno for target in tuples if any(isinstance(part, ast.Tuple) for part in target.elts)]


def test_kernels_have_no_nested_targets() -> None:
    """Triton 3.6, which comes with torch 2.11, cannot read them: such a kernel is not compiled there."""
    modules = [*Path(register.__file__).parent.glob("*.py"), *(ROOT / "weight_sync").glob("*gpu*.py")]
    assert len(modules) > 25
    assert {path.name: found for path in modules if (found := nested_targets(path.read_text()))} == {}
    assert nested_targets("@triton.jit\ndef wrong(x):\n    (a, b), c = of(x)\n") == [3]


def test_the_choice_of_operators() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ops = select_ops(dtype, "cuda:1", kernels_available=True)
        assert ops.linear is torch.ops.lockstep.linear.default
        assert type(ops.storage) is RowMajor and not ops.batch_invariant
    for dtype, available in ((torch.float64, True), (torch.bfloat16, False)):
        assert select_ops(dtype, "cuda", available).linear is plain.linear


def test_documents_say_what_runs_on_cuda() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "operators.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} >= OPERATORS.keys()


# --- what a CUDA graph can hold ---------------------------------------------------------------------------------------


class WaitsForTheDevice(Exception):
    pass


class NothingIsRead(TorchDispatchMode):
    """Raises for operators that read a tensor's value on the host or whose result has a size that depends on one."""

    refused = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "repeat_interleave", "item")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().partition("::")[2].partition(".")[0]
        if name.strip("_").startswith(tuple(word.strip("_") for word in self.refused)):
            raise WaitsForTheDevice(name)
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if any(index is not None and index.dtype == torch.bool for index in indices):
            raise WaitsForTheDevice(f"{name} by a mask")
        return function(*args, **(kwargs or {}))


def waits(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Return why a CUDA graph cannot capture the function, or "".

    The function runs with CPU tensors, and with meta tensors, which have no values.
    """
    try:
        with NothingIsRead():
            function(*_copies(arguments))
        function(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    except (WaitsForTheDevice, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def float32_cases() -> list[tuple[str, tuple[Any, ...]]]:
    """Return the name of the operator and its arguments in float32 for every case."""
    return [(name_of(case), tuple(copies(given, torch.float32).values())) for case, given in all_cases().items()]


def test_plain_operators_that_a_graph_holds() -> None:
    """Operators that are plain torch on CUDA do not wait, nor does `sample_plain` of plain torch."""
    held = set(OPERATORS) - set(register.TRITON_OPERATORS)
    cases = [case for case in float32_cases() if case[0] in held]
    assert {name for name, _ in cases} == held
    assert not {name: why for name, arguments in cases if (why := waits(OPERATORS[name].plain, arguments))}
    rows = PlainRows.unused(5, "cpu")._replace(temperatures=torch.full((5,), 0.7), greedy=torch.arange(5) > 2)
    out = PlainTokens.empty(5, 0, "cpu")

    def sampled(logits: torch.Tensor, positions: torch.Tensor, *tensors: torch.Tensor) -> None:
        rows, out = PlainRows(*tensors[:7]), PlainTokens(*tensors[7:])
        TorchSampler().sample_plain(logits, rows, positions, out)

    assert not waits(sampled, (_randn(5, 30), torch.arange(5), *rows, *out))


def test_operators_that_a_graph_does_not_hold_are_seen_to_wait() -> None:
    for name, arguments in float32_cases():
        if name in ("fused_experts", "gated_delta"):
            assert waits(OPERATORS[name].plain, arguments), name
    for wrong in (
        lambda x: x[x > 0],
        lambda x: x * float(x.sum()),
        lambda x: x.nonzero(),
        lambda x: x.new_empty(int(x.argmax())),
        lambda x: x if bool(x.any()) else -x,
        lambda x: torch.tensor(x.tolist()),
    ):
        assert waits(wrong, (_randn(4),))


def test_triton_operators_that_a_graph_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With launches left out, their wrappers read no values."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **kwargs: None)
    for name, arguments in float32_cases():
        if name in register.TRITON_OPERATORS:
            assert not waits(register.triton_form(name), arguments), name
