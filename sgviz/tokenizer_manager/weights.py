"""Weights: which ones the engine runs with, as answers tell it. Imports: messages."""

from __future__ import annotations

from dataclasses import dataclass

from sgviz.messages.generate import WEIGHT_VERSION


@dataclass(slots=True)
class Weights:
    """`version` is what a caller named them; `model_path` is where they came from ("": not told)."""

    model_path: str = ""
    version: str = WEIGHT_VERSION
