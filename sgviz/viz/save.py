"""Writing a figure to a file, with one sentence when that fails. Imports: errors, matplotlib."""

from __future__ import annotations

import os

from matplotlib.figure import Figure

from sgviz.errors import SgvizError


def save_figure(figure: Figure, path: str) -> str:
    """Write the figure in the format that the name ends with; returns the name.

    Raises:
        SgvizError: no such format, or the file cannot be written.
    """
    if not os.path.splitext(path)[1]:
        raise SgvizError(f"the figure {path!r} has no ending that says its format; take .png, .svg or .pdf")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise SgvizError(f"cannot write the figure {path!r}: {error}") from error
    return path
