"""Command line options made from the settings: one flag a field, so the two cannot drift apart.

`schedule_policy` becomes `--schedule-policy`; only flags that were given reach `Settings.build`, which keeps
the defaults in one place. Mirrors SGLang's ServerArgs.add_cli_args, which is written by hand.
Imports: config, errors.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec

from sgviz.cli.config_file import read_config
from sgviz.config import Settings
from sgviz.errors import ConfigError, suggest

_PARSER = "settings_parser"  # where a namespace keeps the parser that made it
_CONFIG = "settings_file"  # and the name of the file with settings
LAST_PORT = 65535
METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting as the command line sees it.

    Attributes:
        kind: bool, int, float or str. choices: the allowed texts, if they are few and named.
        default: what the setting is when the flag is not given.
    """

    group: str
    name: str
    kind: type
    choices: tuple[str, ...]
    default: str | int | float | bool | None
    description: str
    source: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def opposite(self) -> str | None:
        """The flag that switches a setting off that is on by default."""
        if self.default is not True:
            return None
        return f"--enable-{self.flag[10:]}" if self.flag.startswith("--disable-") else f"--no-{self.flag[2:]}"

    @property
    def help(self) -> str:
        """Description, default and where the default comes from; `%` is argparse's own, so it is doubled."""
        shown = {True: "on", False: "off"}[self.default] if isinstance(self.default, bool) else self.default
        note = self.source if shown is None else f"default {shown}; {self.source}"
        return f"{self.description} [{note}]".replace("%", "%%")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that wants flags whole, and names the nearest one for a flag it does not know.

    Its subparsers are of the same kind.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        unknown = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
        if unknown is not None:
            self.error(f"unknown option {unknown}{suggest(unknown, self._option_string_actions)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """One sentence and where to read on; the whole usage would bury it."""
        self.exit(2, f"{self.prog}: error: {message}\nSee {self.prog} --help.\n")


def options() -> Iterator[Option]:
    """Every setting, by group, in the order of the fields."""
    for group, struct in get_type_hints(Settings).items():
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            yield _option(group, field, hints[field.name])


def add_options(parser: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    """Give `parser` a flag for every setting but those named in `without`, in the settings' groups.

    The values come back through `settings_from`; a flag that is not given leaves no trace in the namespace.
    """
    groups = get_type_hints(Settings)
    shown = {name: parser.add_argument_group(name, groups[name].__doc__) for name in groups}
    for option in options():
        if option.name not in without:
            _add(shown[option.group], option)
    parser.set_defaults(**{_PARSER: parser})


def add_config(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flag for a file of settings, which `settings_from` reads."""
    parser.add_argument(
        "--config",
        dest=_CONFIG,
        metavar="FILE",
        help="YAML file of settings, one key a flag (without the dashes in front); a flag given here wins.",
    )


def settings_from(namespace: argparse.Namespace, **preset: object) -> Settings:
    """The settings of parsed flags and of the file of `--config`; `preset` holds where neither says anything.

    A value that is not allowed ends the program as argparse does: one sentence, exit code 2.

    Raises:
        ConfigError: the same fault, if the namespace was not made by a parser from `add_options`.
    """
    given = {option.name: getattr(namespace, option.name) for option in options() if option.name in namespace}
    try:
        return _build(getattr(namespace, _CONFIG, None), preset, given)
    except ConfigError as error:
        parser: argparse.ArgumentParser | None = getattr(namespace, _PARSER, None)
        if parser is None:
            raise
        parser.error(error.message)


def _build(path: str | None, preset: dict[str, object], given: dict[str, object]) -> Settings:
    if path is None:
        return Settings.build(**{**preset, **given})
    file = read_config(path, _opposites())
    try:
        return Settings.build(**{**preset, **file.values, **given})
    except ConfigError as error:
        raise (error if error.param in given else file.explained(error)) from None


def _opposites() -> dict[str, str]:
    """The settings that have a flag to switch them off, by what that flag is called in a file."""
    named = {option.opposite: option.name for option in options()}
    return {flag[2:].replace("-", "_"): name for flag, name in named.items() if flag is not None}


def _option(group: str, field: msgspec.structs.FieldInfo, hint: Any) -> Option:
    meta = next(item for item in get_args(hint) if isinstance(item, msgspec.Meta))
    kind, choices = _kind(hint)
    return Option(
        group=group,
        name=field.name,
        kind=kind,
        choices=choices,
        default=field.default,
        description=meta.description or "",
        source=(meta.extra or {})["source"],
    )


def _kind(hint: Any) -> tuple[type, tuple[str, ...]]:
    """The plain type below Annotated and `| None`, and the texts of a Literal."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _kind(get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return _kind(next(part for part in get_args(hint) if part is not type(None)))
    if origin is Literal:
        return str, get_args(hint)
    assert isinstance(hint, type)
    return hint, ()


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    if option.kind is bool:
        _add_switch(group, option)
    elif option.choices:
        group.add_argument(option.flag, choices=option.choices, default=argparse.SUPPRESS, help=option.help)
    else:
        group.add_argument(
            option.flag,
            type=option.kind,
            default=argparse.SUPPRESS,
            metavar=METAVARS[option.kind],
            help=option.help,
        )


def _add_switch(group: argparse._ArgumentGroup, option: Option) -> None:
    group.add_argument(option.flag, action="store_true", default=argparse.SUPPRESS, help=option.help)
    if option.opposite is not None:
        group.add_argument(
            option.opposite,
            dest=option.name,
            action="store_false",
            default=argparse.SUPPRESS,
            help=f"The opposite of {option.flag}.",
        )


def port_number(text: str) -> int:
    """For argparse: a TCP port, 0 included."""
    if not text.isdecimal() or int(text) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to {LAST_PORT}")
    return int(text)
