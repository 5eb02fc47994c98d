"""Settings from a YAML file (`sgviz serve --config file.yaml`): one key a flag (without its dashes), `-` and `_` alike.

What stands on the command line wins. Mirrors SGLang's `--config`; here an error names file and line.
Imports: config, errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from sgviz.config import Settings
from sgviz.errors import ConfigError, suggest

NO_OPPOSITES: Mapping[str, str] = MappingProxyType({})
PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What was read: `values` by the setting's name, and the line on which each stands."""

    path: str
    values: dict[str, object]
    lines: dict[str, int]

    def explained(self, error: ConfigError) -> ConfigError:
        """`error`, with the place in the file if it is about a setting from there."""
        line = self.lines.get(error.param or "")
        return error if line is None else ConfigError(f"{self.path}, line {line}: {error}", param=error.param)


def read_config(path: str, opposites: Mapping[str, str] = NO_OPPOSITES) -> ConfigFile:
    """The settings of the file; their values are checked with those of the command line.

    Args:
        opposites: names that may stand for the negation of a setting, and that setting.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping of names to plain values, or has a name that no
            setting has, or one twice.
    """
    found = ConfigFile(path, {}, {})
    known = [*Settings().flat(), *opposites]
    for key, value, line in _entries(path):
        name = key.replace("-", "_")
        if name not in known:
            raise _fault(path, line, f"unknown setting {key!r}{suggest(name, known)}")
        if name in opposites:
            if not isinstance(value, bool):
                raise _fault(path, line, f"setting {key}: it must be true or false, got {value!r}", name)
            name, value = opposites[name], not value
        if name in found.values:
            raise _fault(path, line, f"{key!r} stands on line {found.lines[name]} already")
        if not isinstance(value, PLAIN):
            raise _fault(
                path, line, f"setting {key}: it takes one plain value, not a {type(value).__name__}", name
            )
        found.values[name], found.lines[name] = value, line
    return found


def _entries(path: str) -> list[tuple[str, object, int]]:
    """Key, value and line (from 1) of the top mapping; none for an empty file."""
    try:
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file.read())
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {path!r} cannot be read: {error}", param="config") from None
    except yaml.YAMLError as error:
        raise _fault(path, _line_of(error), f"this is no YAML: {getattr(error, 'problem', error)}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise _fault(path, root.start_mark.line + 1, "the file must be a mapping of setting names to values")
    return [
        (str(key.value), _value(loader, path, key, node), key.start_mark.line + 1) for key, node in root.value
    ]


def _value(loader: Any, path: str, key: Any, node: Any) -> object:
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        raise _fault(path, key.start_mark.line + 1, f"setting {key.value}: {error}") from None


def _line_of(error: yaml.YAMLError) -> int:
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark is not None else 1


def _fault(path: str, line: int, what: str, param: str = "config") -> ConfigError:
    return ConfigError(f"{path}, line {line}: {what}", param=param)
