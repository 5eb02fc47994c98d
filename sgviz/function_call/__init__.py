"""From a model's text to function calls: one small state machine a format, for streamed and whole answers alike.

Mirrors SGLang's function_call package. Imports: errors.
"""

from __future__ import annotations

from sgviz.function_call.constraint import ToolSpec, calls_schema
from sgviz.function_call.cursor import Cursor, Markers, Spaces
from sgviz.function_call.parser import FORMATS, FunctionCallParser, JsonArrayDetector, detector_of
from sgviz.function_call.pieces import Call, CallArguments, CallStart, Content, Piece, gather

__all__ = [
    "FORMATS", "Call", "CallArguments", "CallStart", "Content", "Cursor", "FunctionCallParser",
    "JsonArrayDetector", "Markers", "Piece", "Spaces", "ToolSpec", "calls_schema", "detector_of", "gather",
]  # fmt: skip
