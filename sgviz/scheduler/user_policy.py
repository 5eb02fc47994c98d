"""A policy of the user's own by name: `module:Class` or `path/to/file.py:Class`.

Where the scheduler is another process an object cannot be handed over, so the class is named, loaded there
and made without arguments. Every fault is a ConfigError that names it. Imports: errors.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from sgviz.errors import ConfigError, suggest

PARAM = "schedule_policy"


def is_user_policy(name: str) -> bool:
    """Whether `name` names a class rather than a built-in policy."""
    return ":" in name


def load_policy(name: str) -> object:
    """A new object of the class that `name` names; a file is run anew each time, so an edit takes effect.

    Raises:
        ConfigError: no such file, module or class, it cannot be made, or it is no policy.
    """
    place, _, class_name = name.rpartition(":")
    if not place or not class_name.isidentifier():
        raise _error(name, "must be module:Class or path/to/file.py:Class")
    module = _run_file(name, Path(place)) if place.endswith(".py") else _import(name, place)
    made = _make(name, module, class_name)
    check_policy(made, name)
    return made


def check_policy(policy: object, name: str) -> None:
    """Raise ConfigError unless `policy` is an object with a text `name` and a method `order`."""
    if isinstance(policy, type):
        raise _error(name, f"is a class; give an object of it: {policy.__name__}()")
    if not isinstance(getattr(policy, "name", None), str):
        raise _error(name, "has no attribute `name` that is a text")
    if not callable(getattr(policy, "order", None)):
        raise _error(name, "has no method order(waiting, view)")


def _run_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise _error(name, f"there is no file {path.absolute()}")
    key = f"sgviz_policy:{path.resolve()}"
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None  # every .py file has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # where dataclasses look for the names in annotations
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        raise _error(name, f"running {path} raised {type(error).__name__}: {error}") from error
    return module


def _import(name: str, module: str) -> ModuleType:
    with _working_directory_importable():
        try:
            return importlib.import_module(module)
        except Exception as error:
            raise _error(name, f"importing {module} raised {type(error).__name__}: {error}") from error


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """As with `python -m`; the command `sgviz` would not look there, and the two must find the same module."""
    here = os.getcwd()
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _make(name: str, module: ModuleType, class_name: str) -> object:
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise _error(name, f"there is no class {class_name!r} in it{suggest(class_name, classes)}")
    try:
        made: object = kind()
    except Exception as error:
        raise _error(
            name, f"{class_name}() raised {type(error).__name__}: {error}; it is made without arguments"
        ) from error
    return made


def _error(name: str, fault: str) -> ConfigError:
    return ConfigError(f"schedule_policy {name}: {fault}", param=PARAM)
