"""The scheduler's rig, which drives a real scheduler turn by turn, serves the tests of the readers too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scheduler"))
