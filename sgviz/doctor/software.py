"""Python, sgviz and the packages it stands on, by their installed versions. Imports: doctor.check."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

import sgviz
from sgviz.doctor.check import Check, State

TOPIC = "software"
OLDEST_PYTHON = (3, 11)
INSTALL = 'Run pip install -e ".[test]" in the checkout, or pip install sgviz.'
SHOWN = ("transformers", "tokenizers", "fastapi", "uvicorn", "msgspec", "pyzmq", "numpy")
_NAME = re.compile(r"[A-Za-z0-9._-]+")

Version = Callable[[str], str | None]


def version(package: str) -> str | None:
    """The installed version, None if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def checks(version_of: Version = version) -> Iterator[Check]:
    """Python and sgviz, then the packages worth naming, then any requirement that is missing."""
    yield _python(sys.version_info[:3])
    yield _sgviz(version_of)
    for package in SHOWN:
        yield _package(package, version_of(package))
    missing = [package for package in requirements() if package not in SHOWN and version_of(package) is None]
    if missing:
        found = f"missing: {', '.join(missing)}"
        yield Check(topic=TOPIC, name="requirements", found=found, state=State.BAD, advice=INSTALL)


def requirements() -> list[str]:
    """What sgviz requires on this platform, without extras; empty when it is imported but not installed."""
    try:
        lines = metadata.requires("sgviz") or []
    except metadata.PackageNotFoundError:
        return []
    names = [match.group() for line in lines if "extra ==" not in line and (match := _NAME.match(line))]
    return [name for name in names if name != "uvloop" or sys.platform != "win32"]


def _python(found: tuple[int, ...]) -> Check:
    text = f"{'.'.join(map(str, found))} ({platform.python_implementation()}, {sys.executable})"
    if found[:2] >= OLDEST_PYTHON:
        return Check(topic=TOPIC, name="Python", found=text)
    advice = f"sgviz needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer; make an environment with one."
    return Check(topic=TOPIC, name="Python", found=text, state=State.BAD, advice=advice)


def _sgviz(version_of: Version) -> Check:
    installed = version_of("sgviz")
    where = str(sgviz.__path__[0])
    if installed is None:
        found = f"{sgviz.__version__} in {where}, not installed"
        return Check(topic=TOPIC, name="sgviz", found=found, state=State.WARN, advice=INSTALL)
    return Check(topic=TOPIC, name="sgviz", found=f"{sgviz.__version__} in {where}")


def _package(name: str, found: str | None) -> Check:
    if found is None:
        return Check(topic=TOPIC, name=name, found="not installed", state=State.BAD, advice=INSTALL)
    return Check(topic=TOPIC, name=name, found=found)
