"""One colour for one meaning, in every figure, table and widget, on light and on dark ground.

Phases of a request are saturated; memory that is in use is warm, memory that can be had is pale.
Neighbours differ in lightness too, so that the pictures survive a grey printer and colour blindness.

Imports: errors.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.errors import BadRequest, suggest


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours (hex) by meaning.

    Attributes:
        tokenize, queue, prefill, decode, output: phases of a request, and bootstrap, prealloc, transfer those of a
            server with one side; prefill and decode are also the
            modes extend and decode of a batch, `mixed` the third.
        free, evictable, private, protected: states of a KV token.
        ground, text, muted, grid: the page. alert: losses and failures.
    """

    tokenize: str
    queue: str
    prefill: str
    decode: str
    mixed: str
    output: str
    bootstrap: str
    prealloc: str
    transfer: str
    free: str
    evictable: str
    private: str
    protected: str
    ground: str
    text: str
    muted: str
    grid: str
    alert: str

    def of(self, meaning: str) -> str:
        """The colour of a meaning by name; `extend` is prefill, `detokenize` is output.

        Raises:
            BadRequest: no such meaning.
        """
        name = {"extend": "prefill", "detokenize": "output"}.get(meaning, meaning)
        if name not in self.__dataclass_fields__:
            names = list(self.__dataclass_fields__)
            raise BadRequest(
                f"no colour for {meaning!r}{suggest(meaning, names)}; there are {', '.join(names)}"
            )
        colour: str = getattr(self, name)
        return colour


LIGHT = Theme(
    tokenize="#9aa1ab", queue="#f0b429", prefill="#2f6fd0", decode="#35a57a", mixed="#1fa3b8",
    output="#9b59c9", bootstrap="#8a6d3b", prealloc="#d98c2b", transfer="#d1408f", free="#eef1f4",
    evictable="#b9cbe4", private="#f29c6b", protected="#c44f3a",
    ground="#ffffff", text="#1f2530", muted="#69707c", grid="#dfe3e8", alert="#c01f3f",
)  # fmt: skip

DARK = Theme(
    tokenize="#7d8590", queue="#e0a526", prefill="#5b96ee", decode="#41bd8b", mixed="#37bfd3",
    output="#b57be0", bootstrap="#a58a5a", prealloc="#e39a45", transfer="#ea6bb0", free="#262c36",
    evictable="#4d6384", private="#e08b58", protected="#d0604b",
    ground="#14181f", text="#e6e9ee", muted="#9aa3b0", grid="#333b47", alert="#ff6b81",
)  # fmt: skip


def theme(name: str) -> Theme:
    """`light` or `dark`.

    Raises:
        BadRequest: any other name.
    """
    themes = {"light": LIGHT, "dark": DARK}
    if name not in themes:
        raise BadRequest(f"no theme {name!r}{suggest(name, themes)}; there are light and dark")
    return themes[name]


@dataclass(frozen=True, slots=True)
class HostColours:
    """Colours (hex) of what the scheduler's thread does, and of the three kinds of time in the account."""

    receive: str
    plan: str
    launch: str
    process: str
    stream: str
    loop: str
    wait: str
    hidden: str
    exposed: str

    def of(self, stage: str) -> str:
        colour: str = getattr(self, stage)
        return colour


HOST_LIGHT = HostColours(
    receive="#9aa1ab", plan="#7b5ea7", launch="#4a3f78", process="#b07aa1", stream="#d4a6c8", loop="#c9bfd6",
    wait="#f1f2f5", hidden="#8ec6a9", exposed="#e4703a",
)  # fmt: skip
HOST_DARK = HostColours(
    receive="#7d8590", plan="#9a7fd0", launch="#c3b5ee", process="#c48ab6", stream="#8f5f86", loop="#5d5573",
    wait="#20262f", hidden="#3d8a66", exposed="#f08a55",
)  # fmt: skip


def host_colours(look: str) -> HostColours:
    """Those of the scheduler's thread, for `light` or `dark`. Raises BadRequest for any other name."""
    theme(look)
    return HOST_LIGHT if look == "light" else HOST_DARK
