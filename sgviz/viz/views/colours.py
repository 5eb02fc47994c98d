"""The colours of `viz.style` for JavaScript. Imports: viz.style."""

from __future__ import annotations

from dataclasses import asdict

from sgviz.viz.style import host_colours, theme


def themes() -> dict[str, dict[str, str]]:
    """Colours by meaning, for light and dark; those of the scheduler's thread with `host_` before them."""
    return {name: {**asdict(theme(name)), **_host(name)} for name in ("light", "dark")}


def _host(name: str) -> dict[str, str]:
    return {f"host_{stage}": colour for stage, colour in asdict(host_colours(name)).items()}
