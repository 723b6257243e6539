"""The layering of docs/architecture.md, read from the imports; file sizes; no unsafe readers.

A package may import packages of a lower layer only, and itself.  Optional extras are the only imports inside
functions, besides the command line's own commands.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.core.args.server_args import ServerArgs
from rollout.core.forward_batch import ForwardBatch
from rollout.scheduler.req import Req

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("capture", "eplb", "weight_sync", "rollout")
MAX_FILE_LINES = 400

# Lower number = lower layer.  Packages of one layer are siblings and do not import each other.
LAYERS = {
    "capture": 0,
    "eplb": 0,
    "weight_sync": 0,
    "rollout.core": 1,
    "rollout.families": 2,
    "rollout.distributed": 2,
    "rollout.mem_cache": 2,
    "rollout.kernels": 2,
    "rollout.attention": 3,
    "rollout.sampling": 3,
    "rollout.layers": 4,
    "rollout.model_executor": 6,
    "rollout.numerics": 7,
    "rollout.scheduler": 7,
    "rollout.control": 8,
    "rollout.engine": 9,
    "rollout.tokenizer_manager": 7,
    "rollout.client": 7,
    "rollout.entrypoints": 10,
    "rollout.integrations": 11,
}
OPTIONAL_EXTRAS = {"flashinfer", "deep_ep"}
LAZY_IMPORT_ALLOWED = {"rollout/cli/main.py"}  # so that `lockstep --help` does not load torch
# What the HTTP process and the trainer-side libraries must never load.
HTTP_PROCESS = ("rollout.server.launch", "rollout.server.serve")
ENGINE_ONLY = (
    "rollout.layers",
    "rollout.model_executor",
    "rollout.scheduler",
    "rollout.control",
    "rollout.engine",
)


def package_of(module: str) -> str | None:
    """The layered package that a dotted module name belongs to."""
    matches = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    return max(matches, key=len, default=None)


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(module, is inside a function) for every absolute import."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield child.module or "", inside
            yield from visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return visit(tree, False)


def violations(files: dict[str, str]) -> list[str]:
    """Upward or sideways imports and imports inside functions; `files` maps relative paths to source text."""
    found = []
    for name, text in files.items():
        path = ROOT / name
        own = package_of(module_name(path))
        if own is None:
            continue
        for module, inside in imports(ast.parse(text)):
            target = package_of(module)
            if target is not None and target != own and LAYERS[target] >= LAYERS[own]:
                found.append(f"{name}: {own} (layer {LAYERS[own]}) imports {module} (layer {LAYERS[target]})")
            if inside and module.split(".")[0] not in OPTIONAL_EXTRAS and name not in LAZY_IMPORT_ALLOWED:
                found.append(f"{name}: imports {module} inside a function")
    return found


def test_packages_import_downward_only() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text() for path in sources()}
    assert not violations(files)


def test_model_families_are_descriptions() -> None:
    """The HTTP process reads them: no torch."""
    for path in (ROOT / "rollout/families").glob("*.py"):
        assert "torch" not in {module.split(".")[0] for module, _ in imports(ast.parse(path.read_text()))}, path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("weight_sync/x.py", "from rollout.core.errors import LockstepError"),
        ("capture/x.py", "import eplb.placement"),
        ("rollout/client/x.py", "from rollout.scheduler.req import Req"),
        ("rollout/core/x.py", "import rollout.memory.kv_pool"),
        ("rollout/families/x.py", "def f():\n    import json"),
    ],
)
def test_the_checker_sees_a_wrong_import(name: str, text: str) -> None:
    assert len(violations({name: text})) == 1


def module_graph() -> dict[str, set[str]]:
    """First-party modules that each module imports when it is loaded."""
    names = {module_name(path): path for path in sources()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        edges = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                edges |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                edges |= (inner & names.keys()) or {node.module}
        graph[name] = {edge for edge in edges if edge in names}
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    stack = [start]
    while stack:
        module = stack.pop()
        if module not in seen:
            seen.add(module)
            stack.extend(graph.get(module, ()))
    return seen


def test_no_import_cycles() -> None:
    graph = module_graph()
    cycles = [name for name in graph if any(name in reachable(graph, edge) for edge in graph[name] if edge != name)]
    assert not cycles


def test_http_process_never_loads_the_model_code() -> None:
    graph = module_graph()
    for start in HTTP_PROCESS:
        assert start in graph
        loaded = {module for module in reachable(graph, start) if module.startswith(ENGINE_ONLY)}
        assert not loaded


def test_files_are_small() -> None:
    long = [f"{path}: {n}" for path in sources() if (n := len(path.read_text().splitlines())) > MAX_FILE_LINES]
    assert not long


def test_every_module_says_what_it_knows() -> None:
    bare = [str(path) for path in sources() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not bare


FORBIDDEN_CALLS = {"eval", "exec", "pickle.load", "pickle.loads", "dill.loads", "cloudpickle.loads", "recv_pyobj"}


def forbidden_calls(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            safe_load = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            if name in FORBIDDEN_CALLS or name.endswith(".recv_pyobj") or (name == "torch.load" and not safe_load):
                found.append(name)
    return found


def test_nothing_executes_what_it_reads() -> None:
    assert not [f"{path}: {call}" for path in sources() for call in forbidden_calls(path.read_text())]
    assert forbidden_calls("import pickle; pickle.loads(x); torch.load(f); s.recv_pyobj(); eval(x)") != []
    assert forbidden_calls("torch.load(f, weights_only=True)") == []


def trusting_calls(text: str) -> list[str]:
    """Calls of transformers' loaders that may run a checkpoint's code, or ask on the console whether to."""
    return [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(".from_pretrained")
        and not any(k.arg == "trust_remote_code" and ast.unparse(k.value) == "False" for k in node.keywords)
    ]


def test_no_code_of_a_checkpoint_is_trusted_and_nobody_is_asked_b6() -> None:
    """B6: transformers asks on the console where it is not told."""
    paths = [*sources(), *(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert not [f"{path}: {call}" for path in paths for call in trusting_calls(path.read_text())]
    assert trusting_calls("AutoTokenizer.from_pretrained(folder)") != []
    assert trusting_calls("AutoConfig.from_pretrained(folder, trust_remote_code=True)") != []
    assert trusting_calls("AutoConfig.from_pretrained(folder, trust_remote_code=False)") == []


def test_central_records_stay_small() -> None:

    assert len(ForwardBatch.__slots__) <= 14
    assert len(Req.__slots__) <= 24
    assert len(ServerArgs.__dataclass_fields__) <= 83
