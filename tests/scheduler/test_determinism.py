"""Scheduler and cache read no clock, draw no chance and iterate over no set: replays depend on it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sgviz

ROOT = Path(sgviz.__file__).parent
SOURCES = sorted([*(ROOT / "scheduler").glob("*.py"), *(ROOT / "cache").glob("*.py")])
FORBIDDEN = frozenset({"time", "datetime", "random", "uuid", "secrets"})
ORDERING = frozenset({"list", "tuple", "next", "iter", "enumerate"})
SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference"})


def forbidden(tree: ast.Module) -> list[str]:
    """What a module does that makes two runs differ, one line each."""
    return [what for node in ast.walk(tree) if (what := _fault(node))]


def _fault(node: ast.AST) -> str:
    match node:
        case ast.Import(names=names):
            bad = [alias.name for alias in names if alias.name.split(".")[0] in FORBIDDEN]
            return f"imports {bad}" if bad else ""
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN:
            return f"imports from {module}"
        case ast.Attribute(value=ast.Name(id="random"), attr=attr) if attr != "Random":
            return f"line {node.lineno}: uses random.{attr}"
        case ast.Attribute(value=ast.Attribute(attr="random"), attr=attr):
            return f"line {node.lineno}: uses ...random.{attr}"
        case ast.For(iter=over) | ast.comprehension(iter=over) if _is_set(over):
            return f"line {over.lineno}: iterates over {ast.unparse(over)}"
        case ast.Call(
            func=ast.Name(id="list" | "tuple" | "next" | "iter" | "enumerate"), args=[over, *_]
        ) if _is_set(over):
            return f"orders {ast.unparse(over)}"
        case ast.Call(func=ast.Name(id="hash")):
            return "hashes (strings differ from process to process)"
    return ""


def _is_set(node: ast.expr) -> bool:
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.Call(func=ast.Attribute(attr=attr)) if attr in SET_METHODS:
            return True
        case ast.BinOp(left=left, right=right):
            return _is_set(left) or _is_set(right)
    return False


def faults_of(source: str) -> list[str]:
    return forbidden(ast.parse(source))


@pytest.mark.parametrize("path", SOURCES, ids=[f"{path.parent.name}/{path.name}" for path in SOURCES])
def test_source(path: Path) -> None:
    faults = faults_of(path.read_text())
    if path.name == "policy.py":  # the seeded shuffle
        faults = [fault for fault in faults if "imports ['random']" not in fault]
    assert faults == []


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 20


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import random\nrandom.random()",
        "import numpy as np\nnp.random.default_rng()",
        "for x in set(y): pass",
        "[x for x in {1, 2}]",
        "list(set(a) - set(b))",
        "for x in a.intersection(b): pass",
        "hash('a')",
    ],
)
def test_the_check_can_fail(source: str) -> None:
    assert faults_of(source)


@pytest.mark.parametrize(
    "source", ["x in set(y)", "len({1})", "sorted(set(a))", "for x in sorted(set(a)): pass"]
)
def test_membership_and_sorting_are_fine(source: str) -> None:
    assert faults_of(source) == []
