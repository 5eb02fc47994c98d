"""The setting custom_logit_processors as names and classes: `name=module:Class,other=path/to/file.py:Class`.

Imports: config.user_class, errors.
"""

from __future__ import annotations

import re

from sgviz.config.user_class import UserClass
from sgviz.errors import ConfigError

PARAM = "custom_logit_processors"
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def named_processors(setting: str | None) -> dict[str, UserClass]:
    """By name the class; nothing is loaded.

    Raises:
        ConfigError: an entry is not name=module:Class or name=file.py:Class, or a name is given twice.
    """
    out: dict[str, UserClass] = {}
    for entry in (setting or "").split(","):
        if not entry.strip():
            continue
        name, _, place = (part.strip() for part in entry.partition("="))
        if not _NAME.fullmatch(name) or ":" not in place:
            raise ConfigError(
                f"setting {PARAM}: {entry.strip()!r} must be name=module:Class or name=path/to/file.py:Class, the "
                "name of letters, digits, _, . and -",
                param=PARAM,
            )
        if name in out:
            raise ConfigError(f"setting {PARAM}: the name {name!r} is given twice", param=PARAM)
        out[name] = UserClass(PARAM, place)
    return out
