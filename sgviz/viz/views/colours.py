"""The colours of `viz.style` for JavaScript. Imports: viz.style."""

from __future__ import annotations

from dataclasses import asdict

from sgviz.viz.style import theme


def themes() -> dict[str, dict[str, str]]:
    """Colours by meaning, for light and dark."""
    return {name: asdict(theme(name)) for name in ("light", "dark")}
