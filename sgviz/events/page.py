"""The event page: `EVENTS.md` is written from the structs, so it cannot say anything else than the code.

`python -m sgviz.events.page` writes it, with `--check` it only says whether it is up to date (exit 1 if not).
The stages are the ruled comments of the module in which a struct stands. Imports: events.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from enum import StrEnum
from pathlib import Path
from types import ModuleType

import msgspec

from sgviz.events import schema

PAGE = Path(__file__).with_name("EVENTS.md")
_RULE = re.compile(r"^# -{10,} (?P<title>.+?)\s*$")
_HEAD = """# Events

Written from the structs by `python -m sgviz.events.page`; do not edit. Schema {version}, {count} kinds.

An event is its stamp and a body. `seq` counts per component, `t` is monotonic nanoseconds, `iteration` is the
scheduler's loop number (0 elsewhere). In a file and on the wire an event is the msgpack array `[{stamp}]`
and a body is `[kind, field, ...]` with the fields in the order given here.
"""


def page() -> str:
    """The whole page as Markdown."""
    stamp = ", ".join(schema.Event.__struct_fields__)
    parts = [_HEAD.format(version=schema.SCHEMA_VERSION, count=len(schema.BODY_OF), stamp=stamp)]
    parts += [_table(title, bodies) for title, bodies in stages().items()]
    parts.append(_reasons(schema.Reason))
    return "\n".join(parts)


def stages() -> dict[str, list[type[schema.Body]]]:
    """Stage title -> its bodies, both in the order of the source."""
    found: dict[str, list[type[schema.Body]]] = {}
    for body in schema.BODY_OF.values():
        found.setdefault(_stage(body), []).append(body)
    return found


def _stage(body: type[schema.Body]) -> str:
    """The last ruled comment above the class, else the name of its module."""
    module = inspect.getmodule(body)
    assert isinstance(module, ModuleType)
    above = inspect.getsource(module).splitlines()[: inspect.getsourcelines(body)[1]]
    titles = [match["title"] for line in above if (match := _RULE.match(line))]
    return titles[-1] if titles else module.__name__.rpartition(".")[2]


def _table(title: str, bodies: list[type[schema.Body]]) -> str:
    rows = [f"| `{schema.KIND_OF[body]}` | {_meaning(body)} | {_fields(body)} |" for body in bodies]
    return "\n".join(
        [f"## {title[0].upper()}{title[1:]}", "", "| kind | meaning | fields |", "|---|---|---|", *rows, ""]
    )


def _meaning(body: type[schema.Body]) -> str:
    """The docstring in one cell; paragraphs become line breaks."""
    paragraphs = inspect.cleandoc(body.__dict__.get("__doc__") or "").split("\n\n")
    return _cell("<br>".join(" ".join(paragraph.split()) for paragraph in paragraphs))


def _fields(body: type[schema.Body]) -> str:
    return "<br>".join(
        f"`{_cell(_field(field, body.__annotations__))}`" for field in msgspec.structs.fields(body)
    )


def _field(field: msgspec.structs.FieldInfo, annotations: dict[str, str]) -> str:
    default = "" if field.default is msgspec.NODEFAULT else f" = {field.default!r}"
    return f"{field.name}: {annotations[field.name]}{default}"


def _reasons(reasons: type[StrEnum]) -> str:
    values = ", ".join(f"`{reason.value}`" for reason in reasons)
    return f"## Reasons of a refusal\n\n{inspect.getdoc(reasons)} {values}.\n"


def _cell(text: str) -> str:
    """A bar would end the cell."""
    return text.replace("|", "\\|")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sgviz.events.page", description="Write the event page.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the page is out of date"
    )
    check: bool = parser.parse_args(argv).check
    if not check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.name} is out of date; run python -m sgviz.events.page", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
