"""A policy of the user's own by name: `module:Class` or `path/to/file.py:Class`.

Where the scheduler is another process an object cannot be handed over, so the class is named, loaded there
and made without arguments. Every fault is a ConfigError that names it. Imports: config, errors.
"""

from __future__ import annotations

from sgviz.config.user_class import UserClass

PARAM = "schedule_policy"


def is_user_policy(name: str) -> bool:
    """Whether `name` names a class rather than a built-in policy."""
    return ":" in name


def load_policy(name: str) -> object:
    """A new object of the class that `name` names; a file is run anew each time, so an edit takes effect.

    Raises:
        ConfigError: no such file, module or class, it cannot be made, or it is no policy.
    """
    made = UserClass(PARAM, name).make()
    check_policy(made, name)
    return made


def check_policy(policy: object, name: str) -> None:
    """Raise ConfigError unless `policy` is an object with a text `name` and a method `order`."""
    user = UserClass(PARAM, name)
    if isinstance(policy, type):
        raise user.fault(f"is a class; give an object of it: {policy.__name__}()")
    if not isinstance(getattr(policy, "name", None), str):
        raise user.fault("has no attribute `name` that is a text")
    if not callable(getattr(policy, "order", None)):
        raise user.fault("has no method order(waiting, view)")
