"""An object of a user's own class by name: `module:Class` or `path/to/file.py:Class`.

What runs in another process cannot be handed over as an object, so its class is named in a setting, loaded there and
made without arguments. Every fault is a ConfigError that names the setting. Imports: errors.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from sgviz.errors import ConfigError, suggest


@dataclass(frozen=True, slots=True)
class UserClass:
    """A class as the setting `param` names it."""

    param: str
    name: str

    def make(self) -> object:
        """A new object of it; a file is run anew each time, so an edit takes effect.

        Raises:
            ConfigError: no such file, module or class, or it cannot be made.
        """
        place, _, class_name = self.name.rpartition(":")
        if not place or not class_name.isidentifier():
            raise self.fault("must be module:Class or path/to/file.py:Class")
        module = self._run_file(Path(place)) if place.endswith(".py") else self._import(place)
        return self._made(module, class_name)

    def fault(self, what: str) -> ConfigError:
        """The error to raise when `what` is wrong with it."""
        return ConfigError(f"{self.param} {self.name}: {what}", param=self.param)

    def _run_file(self, path: Path) -> ModuleType:
        if not path.is_file():
            raise self.fault(f"there is no file {path.absolute()}")
        key = f"sgviz_user:{path.resolve()}"
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None and spec.loader is not None  # every .py file has a loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module  # where dataclasses look for the names in annotations
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[key]
            raise self.fault(f"running {path} raised {type(error).__name__}: {error}") from error
        return module

    def _import(self, module: str) -> ModuleType:
        with _working_directory_importable():
            try:
                return importlib.import_module(module)
            except (Exception, SystemExit) as error:
                raise self.fault(f"importing {module} raised {type(error).__name__}: {error}") from error

    def _made(self, module: ModuleType, class_name: str) -> object:
        kind = getattr(module, class_name, None)
        if not isinstance(kind, type):
            classes = [key for key, value in vars(module).items() if isinstance(value, type)]
            raise self.fault(f"there is no class {class_name!r} in it{suggest(class_name, classes)}")
        try:
            made: object = kind()
        except (Exception, SystemExit) as error:
            raise self.fault(
                f"{class_name}() raised {type(error).__name__}: {error}; it is made without arguments"
            ) from error
        return made


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """As with `python -m`; the command `sgviz` would not look there, and the two must find the same module."""
    here = os.getcwd()
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)
