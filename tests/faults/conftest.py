"""Helpers of other folders: servers as processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))  # server_process
