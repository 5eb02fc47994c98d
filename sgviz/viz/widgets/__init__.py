"""The live widgets of a notebook. Every one takes a recording: live, from a file, or of a server (`sgviz.connect`).

Imports: recording, viz, anywidget.
"""

from sgviz.viz.widgets.live import Dashboard, Journey, KVMap, LiveWidget, RadixTree
from sgviz.viz.widgets.stepper import Stepper

__all__ = ["Dashboard", "Journey", "KVMap", "LiveWidget", "RadixTree", "Stepper"]
