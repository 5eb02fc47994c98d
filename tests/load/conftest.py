"""Helpers of other folders: servers as processes, clients of the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests/launch"), str(ROOT / "benchmarks")]  # server_process, slow_readers
