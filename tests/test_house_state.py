"""No state at the top of a module: two engines in one process share nothing but what the process has one of.

What a module holds is a constant: a value that cannot change, or a table that is named in capitals; and nobody writes
to what is named so, as far as that can be read (under another name it could be).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from test_house_rules import PACKAGE, ROOT, nodes, sources, word

# what a module may call for a value that it holds, beside the package's own frozen classes; an APIRouter is filled by
# its own module alone, while that is imported, and every app copies its routes
MAKES_CONSTANTS = {
    "APIRouter", "MappingProxyType", "Path", "Struct", "TypeVar", "TypeVarTuple", "attrgetter", "compile", "encode",
    "frozenset", "getLogger", "get_args", "max", "object", "tuple", "uint64", "with_name",
}  # fmt: skip
CHANGES = {
    "__setitem__", "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft",
    "remove", "reverse", "setdefault", "sort", "update",
}  # fmt: skip
OF_THE_PROCESS = {
    "function_call/python_literal.py:_PARSING": "the filters of warnings are one list for all threads",
    "launch/threads.py:switch_interval": "the interpreter has one for all threads",
    "model/packed_linear.py:_alone_differs": "a fact of this CPU, found out once",
    "model/torch_jit.py:_one_at_a_time": "torch keeps one table of the classes that it compiles",
    "worker/profiler.py:profiler_claim": "torch makes one profile at a time",
}


def frozen_classes() -> set[str]:
    kinds = [node for node in nodes(sources("sgviz")) if isinstance(node, ast.ClassDef)]
    return {
        kind.name
        for kind in kinds
        if "frozen=True" in ast.unparse(ast.Module([kind], [])).partition(":\n")[0]
    }


def state_in(tree: ast.Module, frozen: set[str]) -> list[str]:
    """Names at the top of a module whose value can change: tables not in capitals, caches, objects."""
    found = []
    for node in top(tree.body):
        if isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(d) for d in node.decorator_list):
            found.append(node.name)
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        name = word(node.targets[0] if isinstance(node, ast.Assign) else node.target) or ""
        tables = (ast.Dict, ast.DictComp, ast.List, ast.ListComp, ast.Set, ast.SetComp)
        if isinstance(node.value, tables) and not constant(name):
            found.append(name)
        if isinstance(node.value, ast.Call) and word(node.value.func) not in MAKES_CONSTANTS | frozen:
            found.append(name)
    return found


def top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that an import runs, but for those in a class."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in ("body", "orelse", "finalbody"):
                yield from top(getattr(node, inner, []))


def constant(name: str | None) -> bool:
    return name is not None and (name.strip("_").isupper() or name == "__all__")


def changes_in(tree: ast.Module) -> list[str]:
    """Where something whose name is in capitals is written to, and where a function names a global one."""
    found = []
    for node in ast.walk(tree):
        changed: list[ast.AST] = []
        if isinstance(node, ast.Assign | ast.Delete):
            changed = [each for each in node.targets if not isinstance(each, ast.Name)]
        elif isinstance(node, ast.AugAssign):
            changed = [node.target]
        elif isinstance(node, ast.Call) and word(node.func) in CHANGES:
            changed = [node.func]
        names = [word(part) for each in changed for part in (each, getattr(each, "value", each))]
        if isinstance(node, ast.Global) or any(map(constant, names)):
            found.append(ast.unparse(node))
    return found


def test_modules_hold_constants_and_what_belongs_to_the_process() -> None:
    frozen = frozen_classes()
    found = {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in sources("sgviz")
        for name in state_in(ast.parse(path.read_text()), frozen)
    }
    assert found == set(OF_THE_PROCESS)


def test_nobody_changes_a_constant() -> None:
    found = {
        str(path.relative_to(ROOT)): changes_in(ast.parse(path.read_text())) for path in sources("sgviz")
    }
    assert {name: changes for name, changes in found.items() if changes} == {}


@pytest.mark.parametrize(
    "text",
    ["seen = {}", "seen: list[int] = []", "if x:\n    seen = [y for y in z]", "SEEN = dict()", "COUNTS = Counter()",
     "A = Thing()", "@cache\ndef seen(): ..."],
)  # fmt: skip
def test_state_of_a_module_is_recognised(text: str) -> None:
    assert len(state_in(ast.parse(text), {"Point"})) == 1


@pytest.mark.parametrize(
    "text", ["A = {}", "B = Point()", "__all__ = []", "def f():\n    seen = {}", "n = 3"]
)
def test_constants_of_a_module_are_let_be(text: str) -> None:
    assert state_in(ast.parse(text), {"Point"}) == []


@pytest.mark.parametrize(
    "text",
    ["A[1] = 2", "m.A[1] = 2", "del _A[1]", "A += [1]", "A.append(1)", "m._A.update(x)", "A.x = 1", "m.A = 1",
     "m.A += 1", "def f():\n    global x"],
)  # fmt: skip
def test_a_change_of_a_constant_is_recognised(text: str) -> None:
    assert len(changes_in(ast.parse(text))) == 1


@pytest.mark.parametrize("text", ["A = 1", "a[A] = 2", "a.append(A)", "self.x = A", "x += A", "A.get(1)"])
def test_a_use_of_a_constant_is_none(text: str) -> None:
    assert changes_in(ast.parse(text)) == []
