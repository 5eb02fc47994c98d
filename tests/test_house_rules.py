"""The rules of the house that no linter knows: what an import may cost, sizes, words, events without a reader."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgviz.events import page, schema

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sgviz"
LAYOUT = PACKAGE / "LAYOUT.md"
READING_WING = ("recording", "viz")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MACHINE_PATH = r"(?<![\w.~/}])/(?:work|root|opt|Users|mnt)/\w+|/home/[a-z]\w*|/tmp/[a-z]\w*/"
HEAVY = ("torch", "transformers", "matplotlib", "pandas")
LIGHT_IMPORTS = (
    "sgviz",
    "sgviz.cache.kv_cache",
    "sgviz.doctor",
    "sgviz.launch.child",
    "sgviz.launch.components",
    "sgviz.launch.pipeline",
    "sgviz.model.fetch",
    "sgviz.model.tokenizer",
    "sgviz.recording",
    "sgviz.scheduler.scheduler",
    "sgviz.serving.app",
    "sgviz.worker.mock_worker",
)
WITH_TABLES = ("sgviz.recording", "sgviz.launch.pipeline")  # these may load pandas, and nothing else heavy


def sources(*folders: str) -> list[Path]:
    """The project's own Python files."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tracked() -> dict[str, str]:
    """Every file under version control that is text, by its name."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    texts = {}
    for name in filter(None, listed.split("\0")):
        raw = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in raw[:8192]:
            texts[name] = raw.decode("utf-8", errors="replace")
    return texts


# ---------------------------------------------------------------- what an import costs


@pytest.mark.parametrize("module", LIGHT_IMPORTS)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= ({"pandas"} if module in WITH_TABLES else set())


def test_events_stand_on_msgspec_alone() -> None:
    code = "import sys; before = set(sys.modules); import sgviz.events; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    roots = {name.partition(".")[0] for name in done.stdout.split()}
    # typing_extensions comes with msgspec
    assert roots - set(sys.stdlib_module_names) - {"typing_extensions"} == {"sgviz", "msgspec"}


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("folder", ["sgviz", "tests", "benchmarks"])
def test_no_file_is_too_long(folder: str) -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(folder)}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


@pytest.mark.parametrize("folder", ["sgviz", "tests", "benchmarks"])
def test_no_function_is_too_long(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in sources(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert {name: length for name, length in found.items() if length > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", sources("sgviz"), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree)


# ---------------------------------------------------------------- words


def places(pattern: str, flags: re.RegexFlag = re.NOFLAG) -> list[str]:
    """`file:line` of each match in the files under version control."""
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for name, text in tracked().items()
        for match in re.finditer(pattern, text, flags)
    ]


def test_nothing_is_left_for_later() -> None:
    # the words are put together here, so that this file does not hold them
    assert places(rf"\b({'TO' + 'DO'}|{'FIX' + 'ME'}|{'X' * 3})\b") == []


def test_no_path_of_somebody_s_machine() -> None:
    assert places(MACHINE_PATH) == []


@pytest.mark.parametrize(
    "text", ["/work" + "/x", "see /root" + "/y.", '"/home' + '/ann/z"', "/tmp" + "/ab/c"]
)
def test_paths_of_a_machine_are_recognised(text: str) -> None:
    assert re.search(MACHINE_PATH, text)


@pytest.mark.parametrize(
    "text", ["and/work/x", "{base}/opt/x", "https://a.b/root/c", "/tmp/sgviz-ab/x", "/v1/models"]
)
def test_other_paths_are_not(text: str) -> None:
    assert not re.search(MACHINE_PATH, text)


def test_no_package_index_is_named() -> None:
    hosts = [
        r"pypi\.org",
        r"pythonhosted\.org",
        r"download\.pytorch\.org",
        r"npmjs\.org",
        r"deb\.debian\.org",
    ]
    assert places("|".join(hosts), re.IGNORECASE) == []
    assert places(r"(?:--|_)(?:extra[-_])?index[-_]url|find[-_]links=") == []


# ---------------------------------------------------------------- time and chance


@pytest.mark.parametrize(
    "path", sources("sgviz/scheduler", "sgviz/cache", "sgviz/batch"), ids=lambda path: path.stem
)
def test_decisions_take_time_and_chance_from_outside(path: Path) -> None:
    """Only a seeded `random.Random` may be made; clocks and ids come from the caller."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not imported(node) & {"time", "datetime", "secrets", "uuid"}, f"line {node.lineno}"
        if isinstance(node, ast.ImportFrom):
            assert node.module != "random", f"line {node.lineno}"
        if isinstance(node, ast.Attribute) and word(node.value) == "random":
            assert node.attr == "Random", f"line {node.lineno}"
        if isinstance(node, ast.For | ast.comprehension):
            assert not isinstance(node.iter, ast.Set | ast.SetComp), "iterates over a set"


def imported(node: ast.AST) -> set[str]:
    """Top-level names of the modules that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


# ---------------------------------------------------------------- events


def nodes(paths: list[Path]) -> Iterator[ast.AST]:
    for path in paths:
        yield from ast.walk(ast.parse(path.read_text()))


def word(node: ast.AST) -> str | None:
    """The name or string that a node stands for."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def wing(*, reading: bool) -> list[Path]:
    return [
        path for path in sources("sgviz") if (path.relative_to(PACKAGE).parts[0] in READING_WING) is reading
    ]


def test_every_event_is_emitted_by_the_engine() -> None:
    made = {word(node.func) for node in nodes(wing(reading=False)) if isinstance(node, ast.Call)}
    assert [kind for kind, body in schema.BODY_OF.items() if body.__name__ not in made] == []


def test_every_event_has_a_reader() -> None:
    read = {word(node) for node in nodes(wing(reading=True))}
    assert [kind for kind, body in schema.BODY_OF.items() if not {body.__name__, kind} & read] == []


def test_every_event_has_a_meaning_and_the_page_is_up_to_date() -> None:
    assert [kind for kind, body in schema.BODY_OF.items() if not body.__dict__.get("__doc__")] == []
    assert page.PAGE.read_text(encoding="utf-8") == page.page()


def test_the_page_names_every_kind_and_field_once_under_its_stage() -> None:
    rows = [line for line in page.page().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(schema.BODY_OF)
    for row, body in zip(rows, schema.BODY_OF.values()):
        # a bar inside a cell is escaped, so splitting at bare bars gives the cells
        cells = re.split(r"(?<!\\)\|", row)
        assert len(cells) == 5
        assert re.findall(r"`(\w+): ", cells[3]) == list(body.__struct_fields__)
    assert next(iter(page.stages())) == "processes and recording"


def test_a_page_out_of_date_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "EVENTS.md")
    assert page.main(["--check"]) == 1
    assert page.main([]) == 0
    assert page.main(["--check"]) == 0
    (tmp_path / "EVENTS.md").write_text("old", encoding="utf-8")
    assert page.main(["--check"]) == 1


# ---------------------------------------------------------------- pages


def test_the_layout_page_lists_every_module_and_no_other() -> None:
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", LAYOUT.read_text(encoding="utf-8"), re.MULTILINE)
    modules = {
        path.relative_to(PACKAGE).as_posix() for path in sources("sgviz") if path.name != "__init__.py"
    }
    assert len(listed) == len(set(listed))
    assert set(listed) ^ modules == set()


def test_the_layout_page_names_what_exists() -> None:
    """Each `module.py` `Class.method` of the table of SGLang's names can be found there."""
    pairs = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", LAYOUT.read_text(encoding="utf-8"))
    assert len(pairs) > 40
    missing = [f"{file} {name}" for file, name in pairs if not defines(PACKAGE / file, name.split("."))]
    assert missing == []


def defines(path: Path, names: list[str]) -> bool:
    scope: ast.AST | None = ast.parse(path.read_text()) if path.exists() else None
    for name in names:
        inside = ast.iter_child_nodes(scope) if scope is not None else ()
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        scope = next((node for node in inside if isinstance(node, kinds) and node.name == name), None)
    return scope is not None


# ---------------------------------------------------------------- what people are told is what CI does


def test_ci_installs_and_tests_with_the_readme_s_lines() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci/run").read_text()
    for line in ('pip install -e ".[test]"', "pytest -n 2"):
        assert re.search(rf"^\s*(\$ )?{re.escape(line)}\s*(#.*)?$", readme, re.MULTILINE), (
            f"README.md lacks: {line}"
        )
        assert line in ci
    assert "bash .ci/check" in ci


def test_the_import_contracts_cover_every_room() -> None:
    """A new folder or module must be given its place, or the contracts would not see it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = set(re.findall(r"sgviz\.(\w+)", str(contracts)))
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sources("sgviz")} - {
        "__init__"
    }
    assert rooms - named == set()
