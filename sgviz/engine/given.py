"""What a caller gives an engine: its mode and settings when it is made, and options of its methods, by name.

SGLang's Engine takes ServerArgs. Imports: config, scheduler (user_policy), errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from sgviz.config import Settings
from sgviz.errors import BadRequest, ConfigError, suggest
from sgviz.scheduler.user_policy import check_policy

Mode = Literal["threads", "processes"]


def check_options(call: str, given: Iterable[str], allowed: Sequence[str]) -> None:
    """Raises BadRequest for the first of `given` that `call` does not take, with the name that is near to it."""
    unknown = next((name for name in given if name not in allowed), None)
    if unknown is not None:
        hint = suggest(unknown, allowed)
        raise BadRequest(
            f"{call}: unknown option {unknown!r}{hint}; allowed are {', '.join(allowed)}", param=unknown
        )


def check_mode(mode: str, policy: object) -> None:
    if mode not in ("threads", "processes"):
        raise ConfigError(f"mode {mode!r} is not one of threads, processes")
    if policy is None:
        return
    if mode == "processes":
        raise ConfigError(
            "a policy given as an object works in mode='threads' only: the scheduler is another process; "
            "name it instead (module:Class or file.py:Class)"
        )
    check_policy(policy, getattr(policy, "__name__", type(policy).__name__))


def settings_of(given: Mapping[str, object]) -> Settings:
    """The Settings that `Engine(**given)` runs with; a policy given as an object is left out."""
    flat = dict(given)
    event_loop, model = flat.pop("event_loop", None), flat.pop("model", None)
    if event_loop not in (None, "normal", "overlap"):
        raise ConfigError(f"event_loop {event_loop!r} is not one of normal, overlap", param="event_loop")
    if event_loop is not None:
        flat["disable_overlap_schedule"] = event_loop == "normal"
    if model is not None:
        flat.setdefault("model_path", model)
    if not isinstance(flat.get("schedule_policy", ""), str):
        del flat["schedule_policy"]
    return Settings.build(**flat)
