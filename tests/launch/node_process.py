"""`sgviz serve` on a host after the first, as a real process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

from server_process import ServerProcess


class NodeProcess(ServerProcess):
    """Its `url` is that of the health stub."""

    READY = r"is ready: data parallel ranks .*; (https?://\S+)/health"
