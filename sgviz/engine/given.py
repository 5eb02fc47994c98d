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


def check_nodes(settings: Settings, mode: str) -> None:
    """Raise ConfigError for an engine on several hosts that is not node 0, or not of processes."""
    parallel = settings.parallel
    if parallel.node_rank:
        raise ConfigError(
            f"node_rank = {parallel.node_rank}: such a node only runs schedulers; start it with `sgviz serve` (node 0 "
            "may be an Engine)",
            param="node_rank",
        )
    if parallel.nnodes > 1 and mode != "processes":
        raise ConfigError(
            f"nnodes = {parallel.nnodes} works in mode='processes' only: ranks on other hosts cannot be threads of "
            "this process",
            param="nnodes",
        )


def check_one_scheduler(settings: Settings, policy: object) -> None:
    """Raise ConfigError for a policy given as an object to several schedulers, which would share it."""
    if policy is not None and (size := settings.parallel.dp_size) > 1:
        raise ConfigError(
            f"a policy given as an object is one scheduler's, and dp_size = {size}; name its class instead "
            "(module:Class or file.py:Class), so that each rank makes its own",
            param="schedule_policy",
        )


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
