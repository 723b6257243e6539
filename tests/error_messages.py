"""Every message of an error of the project, as its source text states it: `python -m tests.error_messages`.

A message is a pattern: `…` stands for each value that the code fills in.  `collect` walks the syntax trees of the four
packages.  It takes the text that an error class is called with, and texts of `MORE` and `EXCEPTIONS`.  A text that
stands elsewhere is followed: through variables, attributes, arguments and results of functions.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("rollout", "weight_sync", "capture", "eplb")
TREES = frozenset({"LockstepError", "WeightSyncError", "CaptureError", "EplbError", "KernelBuildError"})
"""Roots of the trees of errors.  All classes that inherit from one of these count."""
EXCEPTIONS = frozenset(
    {"OSError", "PermissionError", "RuntimeError", "SystemExit", "TemplateError", "SecurityError", "TypeError"}
) | {"ValueError"}
"""Foreign classes: a `raise` of one with a text counts too, as messages of the project quote it."""
MORE = frozenset(
    {
        ("rollout/http/gate.py", "refusal"),
        ("rollout/http/io.py", "error_content"),
        ("rollout/server/scheduler_process.py", "describe_exit"),
        ("rollout/server/scheduler_process.py", "first_end"),
    }
)
"""Functions whose results callers read, but which make no error."""
MESSAGE_ARGUMENT: dict[str, int | str] = {"ServerError": 1, "ArgumentError": 1, "FinishReason": "message"}
"""Place or name of the text among the arguments, where it is not the first.  A `FinishReason` may be of an abort."""
PARSERS = frozenset({"parser", "self"})
"""Variables whose method `error` ends a command with a message."""
VALUE = "…"
MAX_FORMS = 400
"""Patterns that one text may have."""
MIN_LETTERS = 12
"""Letters that make a text recognisable."""
HINTS = " (;,."
"""A text that begins so is a hint at the end of a message, which may be missing."""
VERBS = frozenset(
    {"are", "cannot", "could", "did", "had", "has", "have", "is", "may", "most", "must", "needs", "runs", "ran"}
    | {"sends", "serves", "takes", "was", "were"}
)
"""A text that a message quotes is a reason if it has one of these words, and else a mere name."""
QUOTING = frozenset(
    {"str", "listed", "join", "sorted", "next", "iter", "values", "format", "removesuffix", "capitalize"}
)
"""Functions and methods whose result is the text of their first argument, or of their object."""
_VALUES = re.compile(rf"(\{{\w+\}}|{VALUE})+")
"""Values next to each other, and parts that `str.format` replaces."""


class Message(NamedTuple):
    pattern: str
    kind: str
    path: str
    line: int


class Function(NamedTuple):
    node: ast.FunctionDef | ast.AsyncFunctionDef
    path: str
    owner: str
    """Name of the class, or empty."""


class Scope(NamedTuple):
    function: Function | None
    path: str
    owner: str
    is_result: bool = False
    """True while the result of the function is looked for: its arguments are values of one call then."""


class Sources:
    """The syntax trees of the packages, indexed by what `Texts` looks up."""

    def __init__(self, root: Path, packages: Sequence[str] = PACKAGES) -> None:
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.calls: dict[str, list[tuple[ast.Call, Scope]]] = defaultdict(list)
        self.raises: list[tuple[ast.Raise, Scope]] = []
        self.stores: dict[tuple[str, str, str], list[ast.expr]] = defaultdict(list)
        """Values that are assigned or appended, by path, name of the function, and variable."""
        self.attributes: dict[tuple[str, str], list[tuple[ast.expr, Scope]]] = defaultdict(list)
        """The same of attributes, by path and name."""
        self.bases: dict[str, set[str]] = {}
        for package in packages:
            for path in sorted((root / package).rglob("*.py")):
                name = path.relative_to(root).as_posix()
                self._walk(ast.parse(path.read_text(encoding="utf-8")), Scope(None, name, ""))

    def errors(self) -> set[str]:
        found = set(TREES)
        while more := {name for name, bases in self.bases.items() if bases & found} - found:
            found |= more
        return found

    def _walk(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.ClassDef):
                self.bases[child.name] = {_last_name(base) for base in child.bases}
                inner = Scope(None, scope.path, child.name)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                function = Function(child, scope.path, scope.owner)
                self.functions[child.name].append(function)
                inner = Scope(function, scope.path, scope.owner)
            elif isinstance(child, ast.Call):
                self.calls[_last_name(child.func)].append((child, scope))
                if isinstance(child.func, ast.Attribute) and child.func.attr in ("append", "extend", "add"):
                    self._store(child.func.value, child.args[0] if child.args else None, scope)
            elif isinstance(child, ast.Raise):
                self.raises.append((child, scope))
            elif isinstance(child, ast.Assign):
                for target in child.targets:
                    self._store(target, child.value, scope)
            elif isinstance(child, ast.AnnAssign | ast.NamedExpr | ast.AugAssign):
                self._store(child.target, child.value, scope)
            self._walk(child, inner)

    def _store(self, target: ast.expr, value: ast.expr | None, scope: Scope) -> None:
        if value is None:
            return
        if isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for part, its in zip(target.elts, values):
                self._store(part, its, scope)
        if isinstance(target, ast.Attribute):
            self.attributes[scope.path, target.attr].append((value, scope))
        elif isinstance(target, ast.Name):
            self.stores[scope.path, _place(scope), target.id].append(value)


class Texts:
    """The patterns of an expression."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._known: dict[tuple[int, bool], list[str]] = {}
        self.quoted: dict[str, tuple[str, int]] = {}
        """Reasons that other messages quote, with the places of those."""

    def of(self, node: ast.expr | None, scope: Scope) -> list[str]:
        """Return the patterns that the text of an expression may have; other values are `…`."""
        if node is None:
            return [VALUE]
        key = (id(node), scope.is_result)
        if key not in self._known:
            self._known[key] = [VALUE]  # where it leads back to itself
            found = [_VALUES.sub(VALUE, form) for form in self._forms(node, scope) if form]
            self._known[key] = list(dict.fromkeys(found))[:MAX_FORMS] or [VALUE]
        return self._known[key]

    def _forms(self, node: ast.expr, scope: Scope) -> Iterator[str]:
        match node:
            case ast.Constant(value=str() as text):
                yield text
            case ast.JoinedStr(values=parts):
                yield from self._joined(parts, scope)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                for pair in itertools.product(self.of(left, scope), self.of(right, scope)):
                    yield "".join(pair)
            case ast.IfExp(body=body, orelse=other):
                yield from self.of(body, scope)
                yield from self.of(other, scope)
            case ast.BoolOp(op=ast.And(), values=[*_, last]):
                yield from self.of(last, scope)
            case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                for part in parts:
                    yield from self.of(part, scope)
            case ast.Dict(values=parts):
                for part in parts:
                    yield from self.of(part, scope)
            case ast.ListComp(elt=inner) | ast.GeneratorExp(elt=inner) | ast.SetComp(elt=inner):
                yield from self.of(inner, scope)
            case (
                ast.Await(value=inner)
                | ast.NamedExpr(value=inner)
                | ast.Subscript(value=inner)
                | ast.Starred(value=inner)
            ):
                yield from self.of(inner, scope)
            case ast.Name(id=name):
                yield from self._of_name(name, scope)
            case ast.Attribute(attr=name):
                yield from self._of_attribute(name, scope)
            case ast.Call():
                yield from self._of_call(node, scope)

    def _joined(self, parts: Sequence[ast.expr], scope: Scope) -> Iterator[str]:
        """Yield the text, and note the reasons that it quotes: those at its start, at its end and behind a colon.

        A text that has hardly a word of its own is yielded with each reason instead.
        """
        before = ": "
        forms: list[list[str]] = []
        for number, part in enumerate(parts):
            if isinstance(part, ast.FormattedValue):
                is_reason = before.endswith((": ", "; ", "(")) or number + 1 == len(parts)
                forms.append(self._quoted(part, scope) if is_reason else [VALUE])
                before = VALUE
            elif isinstance(part, ast.Constant):
                before = str(part.value)
                forms.append([before])
        text = "".join(form[0] for form in forms)
        has_reasons = any(len(form) > 1 for form in forms)
        if not has_reasons or _letters(text) >= MIN_LETTERS:
            yield text
        else:
            for pieces in itertools.islice(itertools.product(*(form[1:] or form for form in forms)), MAX_FORMS):
                yield "".join(pieces)

    def _quoted(self, part: ast.FormattedValue, scope: Scope) -> list[str]:
        reasons = [text for text in self.of(part.value, scope) if is_message(text) and text[0] not in HINTS]
        for reason in reasons:
            self.quoted.setdefault(reason, (scope.path, part.lineno))
        return [VALUE, *reasons]

    def _of_name(self, name: str, scope: Scope) -> Iterator[str]:
        for place in dict.fromkeys((_place(scope), "")):
            for value in self._sources.stores.get((scope.path, place, name), ()):
                yield from self.of(value, scope)
        if scope.function is not None and not scope.is_result:
            yield from self._of_argument(name, scope.function)

    def _of_argument(self, name: str, function: Function) -> Iterator[str]:
        names = [argument.arg for argument in [*function.node.args.posonlyargs, *function.node.args.args]]
        keywords = [argument.arg for argument in function.node.args.kwonlyargs]
        if name not in names and name not in keywords:
            return
        is_method = bool(function.owner) and names[:1] in (["self"], ["cls"])
        called = function.owner if function.node.name == "__init__" else function.node.name
        is_unique = len(self._sources.functions[function.node.name]) == 1 or called == function.owner
        for call, scope in self._sources.calls[called]:
            if not (is_unique or scope.path == function.path or _is_of(call.func, function.owner)):
                continue
            given = {word.arg: word.value for word in call.keywords}.get(name)
            if given is None and name in names:
                at = names.index(name) - is_method
                given = call.args[at] if 0 <= at < len(call.args) else None
            if given is not None:
                yield from self.of(given, scope)

    def _of_attribute(self, name: str, scope: Scope) -> Iterator[str]:
        for value, its_scope in self._sources.attributes.get((scope.path, name), ()):
            yield from self.of(value, its_scope)
        for function in self._sources.functions.get(name, ()):  # a property
            if function.path == scope.path:
                yield from self._of_result(function)

    def _of_call(self, node: ast.Call, scope: Scope) -> Iterator[str]:
        name = _last_name(node.func)
        if name in QUOTING:
            inner = node.args or ([node.func.value] if isinstance(node.func, ast.Attribute) else [])
            for argument in inner[:1]:
                yield from self.of(argument, scope)
            return
        functions = self._sources.functions.get(name, [])
        own = [function for function in functions if function.path == scope.path]
        for function in own or (functions if len(functions) == 1 else ()):
            yield from self._of_result(function)

    def _of_result(self, function: Function) -> Iterator[str]:
        scope = Scope(function, function.path, function.owner, is_result=True)
        for node in ast.walk(function.node):
            if isinstance(node, ast.Return | ast.Yield):
                yield from self.of(node.value, scope)


def collect(root: Path = ROOT, packages: Sequence[str] = PACKAGES) -> list[Message]:
    """Return every message, each pattern once for its class and file."""
    sources = Sources(root, packages)
    texts = Texts(sources)
    found: dict[tuple[str, str, str], Message] = {}

    def take(kind: str, node: ast.expr, scope: Scope) -> None:
        for pattern in texts.of(node, scope):
            if is_message(pattern):
                found.setdefault((pattern, kind, scope.path), Message(pattern, kind, scope.path, node.lineno))

    for kind in sorted(sources.errors() | MESSAGE_ARGUMENT.keys()):
        for call, scope in sources.calls[kind]:
            text = _argument(call, MESSAGE_ARGUMENT.get(kind, 0))
            if text is not None:
                take(kind, text, scope)
    for call, scope in sources.calls["error"]:
        if isinstance(call.func, ast.Attribute) and _last_name(call.func.value) in PARSERS and call.args:
            take("", call.args[0], scope)
    for statement, scope in sources.raises:
        call = statement.exc
        if isinstance(call, ast.Call) and call.args:
            name = _last_name(call.func)
            if name in EXCEPTIONS or _holds_class(call.func, sources):
                take(name, call.args[0], scope)
    for path, name in sorted(MORE):
        for function in sources.functions[name]:
            if function.path == path:
                for node in ast.walk(function.node):
                    if isinstance(node, ast.Return) and node.value is not None:
                        take("", node.value, Scope(function, path, function.owner))
    patterns = {message.pattern for message in found.values()}
    for pattern, (path, line) in texts.quoted.items():
        if _is_reason(pattern) and not any(other.endswith(pattern) for other in patterns):
            found[pattern, "", path] = Message(pattern, "", path, line)
    return sorted(found.values(), key=lambda message: (message.path, message.line, message.pattern))


def is_message(pattern: str) -> bool:
    return _letters(pattern) > 3 and len(pattern.split()) > 1


def _argument(call: ast.Call, at: int | str) -> ast.expr | None:
    if isinstance(at, int):
        return call.args[at] if len(call.args) > at else None
    return next((word.value for word in call.keywords if word.arg == at), None)


def _is_reason(text: str) -> bool:
    """Tell a quoted reason, which is a clause, from a quoted name."""
    return not text.endswith(" ") and not VERBS.isdisjoint(text.split()[:-1])


def _holds_class(called: ast.expr, sources: Sources) -> bool:
    """Return whether an error is raised whose class is a value: `raise kind(...)`, `raise type(error)(...)`."""
    if isinstance(called, ast.Name):
        return called.id.islower() and all(function.owner for function in sources.functions[called.id])
    return isinstance(called, ast.Call) and _last_name(called.func) == "type"


def _is_of(called: ast.expr, owner: str) -> bool:
    """Return whether a method is called on a variable that is named like its class: `scheduler.abort`."""
    return (
        isinstance(called, ast.Attribute)
        and bool(_last_name(called.value).strip("_"))
        and _last_name(called.value).strip("_") in owner.lower()
    )


def _letters(pattern: str) -> int:
    return len(re.findall("[A-Za-z]", pattern))


def _place(scope: Scope) -> str:
    return scope.function.node.name if scope.function is not None else ""


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


if __name__ == "__main__":
    for message in collect():
        print(f"{message.path}:{message.line}: {message.kind}: {message.pattern}")
