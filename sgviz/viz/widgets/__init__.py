"""The live widgets of a notebook. Every one takes a recording: live, from a file, or of a server (`sgviz.connect`).

The stepper takes a debugger. Imports: recording, viz, anywidget.
"""

from sgviz.viz.widgets.base import SgvizWidget
from sgviz.viz.widgets.live import Dashboard, Journey, KVMap, LiveWidget, OverlapLanes, RadixTree
from sgviz.viz.widgets.stepper import Stepper

__all__ = [
    "Dashboard", "Journey", "KVMap", "LiveWidget", "OverlapLanes", "RadixTree", "SgvizWidget", "Stepper",
]  # fmt: skip
