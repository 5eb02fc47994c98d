"""What stands in a notebook when nothing runs: a picture. Imports: matplotlib."""

from __future__ import annotations

import base64
import io
from typing import Any

from matplotlib.figure import Figure

DPI = 80
Bundle = tuple[dict[Any, Any], dict[Any, Any]] | None


def png(figure: Figure) -> str:
    """The figure as base64 PNG, for a notebook's output."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return base64.b64encode(buffer.getvalue()).decode()


def with_fallback(bundle: Bundle, more: dict[str, str]) -> Bundle:
    """The widget's own output with what stands in its place where nothing runs; a kernel's page prefers the widget."""
    return None if bundle is None else ({**bundle[0], **more}, bundle[1])
