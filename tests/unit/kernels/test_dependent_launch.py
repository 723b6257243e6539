"""Programmatic dependent launch: every kernel of the GPU path waits for its predecessor before anything else.

Here the sources are read, and the check of compiled kernels is checked.  `test_gpu_model.py` compiles all kernels.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tests.interpreted  # noqa: F401  # before any kernel

# isort: split
from benchmarks.gpu_kernels_table import waits_first
from rollout.core.errors import StartupError
from rollout.kernels.gpu import launch_options

ROOT = Path(__file__).resolve().parents[3]
GPU = ROOT / "rollout" / "kernels" / "gpu"
ITSELF = {"launch_options.py", "predecessor.py"}
WAIT = "wait_for_predecessor()"


def sources() -> dict[str, str]:
    return {path.name: path.read_text() for path in GPU.glob("*.py") if path.name not in ITSELF}


def kernels_that_wait(tree: ast.AST) -> dict[str, bool]:
    """Return for each function that triton compiles whether its first statement is the wait."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            found[node.name] = bool(body) and ast.unparse(body[0]) == WAIT
    return found


def launches(tree: ast.AST) -> list[tuple[str, bool]]:
    """Return the name of each kernel that is launched, and whether with the options of `launch_options`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            name = ast.unparse(node.func.value).rpartition(".")[2]
            given = [ast.unparse(each.value) for each in node.keywords if each.arg is None]
            found.append((name, any(each.startswith("launch_options(") for each in given)))
    return [(name, option) for name, option in found if name.endswith("_kernel")]


def findings(texts: dict[str, str]) -> list[str]:
    """Return what is wrong with the launches of some modules, by their names and sources."""
    trees = {name: ast.parse(text) for name, text in texts.items()}
    waits = {kernel: first for tree in trees.values() for kernel, first in kernels_that_wait(tree).items()}
    found = [f"{name} names the option itself" for name, text in texts.items() if "launch_pdl" in text]
    for name, tree in trees.items():
        for kernel, option in launches(tree):
            found += [] if option else [f"{name} launches {kernel} without the option"]
            found += [] if waits[kernel] else [f"{kernel} does not wait first"]
    return found


def test_every_kernel_is_launched_with_the_option_and_waits_first() -> None:
    assert not findings(sources())
    launched = {kernel for text in sources().values() for kernel, _ in launches(ast.parse(text))}
    all_waits = {k: w for text in sources().values() for k, w in kernels_that_wait(ast.parse(text)).items()}
    assert launched == {name for name in all_waits if name.endswith("_kernel")}
    assert len(launched) >= 27, "the search sees too few kernels"


def test_no_other_module_uses_the_option() -> None:
    for package in ("rollout", "weight_sync", "capture", "eplb"):
        for path in (ROOT / package).rglob("*.py"):
            if path.parent != GPU or path.name not in ITSELF:
                text = path.read_text()
                assert "launch_pdl" not in text and "tl.extra.cuda.gdc" not in text, path


STORE = "        tl.store(cleared + row, 0)\n"
WRONG = {
    "no wait": (f"    {WAIT}\n", ""),
    "a wait behind a store": (f"    {WAIT}\n", f"    if CLEARS:\n{STORE}    {WAIT}\n"),
    "a wait under a condition": (f"    {WAIT}\n", f"    if ADDS:\n        {WAIT}\n"),
    "a launch without the option": ("        **launch_options(residual),\n", ""),
    "an option of its own": ("        **launch_options(residual),\n", "        launch_pdl=True,\n"),
}


@pytest.mark.mutant
@pytest.mark.parametrize("name", WRONG)
def test_wrong_launches_are_caught(name: str) -> None:
    texts, (old, new) = sources(), WRONG[name]
    assert texts["add_rms_norm.py"].count(old) == 1
    assert findings(texts | {"add_rms_norm.py": texts["add_rms_norm.py"].replace(old, new)})


PTX = """
.visible .entry silu_kernel(
	.param .u64 .ptr .global .align 1 silu_kernel_param_0
)
.reqntid 128
{
	.reg .b32 	%r<64>;
$L__func_begin0:
	ld.param.b64 	%rd4, [silu_kernel_param_0];
	griddepcontrol.wait ;
	griddepcontrol.launch_dependents ;
	@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];
	@%p1 st.global.b32 [ %rd2 + 0 ], { %r2 };
	ret;
}
"""
WAITS, STARTS = "\tgriddepcontrol.wait ;\n", "\tgriddepcontrol.launch_dependents ;\n"


@pytest.mark.mutant
def test_compiled_kernels_that_do_not_wait_first_are_caught() -> None:
    """A wrong one may load, store, fetch ahead, add, branch or end before the wait, or not wait at all."""
    assert waits_first(PTX)
    for early in (
        "@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];",
        "ld.volatile.global.b32 %r1, [ %rd1 ];",
        "ld.b32 %r1, [ %rd1 ];",
        "st.global.b32 [ %rd2 + 0 ], { %r2 };",
        "cp.async.cg.shared.global [ %r0 + 0 ], [ %rd1 + 0 ], 0x10, %r3;",
        "prefetch.global.L2 [%rd1];",
        "atom.global.gpu.acq_rel.add.u32 %r5, [ %rd1 + 0 ], 1;",
        "@%p2 bra $L__BB0_2;",
        "@%p2 ret;",
    ):
        assert not waits_first(PTX.replace(WAITS, f"\t{early}\n{WAITS}")), early
    assert not waits_first(PTX.replace(WAITS, ""))
    assert not waits_first(PTX.replace(STARTS, ""))
    assert not waits_first(PTX.replace(WAITS + STARTS, STARTS + WAITS))
    assert not waits_first(PTX.replace(WAITS, f"\t@%p1 {WAITS.strip()}\n"))


def test_the_option_follows_the_device_and_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {0: (9, 0), 1: (8, 9), 2: (10, 0), 3: (0, 0)}
    monkeypatch.setattr(launch_options, "capability", capabilities.__getitem__)

    def options(index: int) -> dict[str, bool]:
        x: torch.Tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))  # type: ignore[assignment]
        return launch_options.launch_options(x)

    assert [options(index) for index in range(4)] == [{"launch_pdl": True}, {}, {"launch_pdl": True}, {}]
    assert launch_options.launch_options(torch.zeros(1)) == {}
    monkeypatch.setattr(launch_options, "FIRST_CAPABILITY", launch_options.NEVER)
    assert [options(index) for index in range(4)] == [{}] * 4


def test_the_variable_is_0_or_1() -> None:
    assert launch_options.first_capability("") == launch_options.first_capability("1") == (9, 0)
    assert launch_options.first_capability("0") == launch_options.NEVER
    with pytest.raises(StartupError, match=r"\$LOCKSTEP_DEPENDENT_LAUNCH is 0 or 1, not 'off'"):
        launch_options.first_capability("off")
