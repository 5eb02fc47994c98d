"""What the live widgets and the page `/viz` show, as values: one Python code makes them for both, and no picture.

Imports: events, errors, recording, numpy. Neither matplotlib nor anywidget.
"""

from sgviz.viz.views.colours import themes
from sgviz.viz.views.live import NAMES, LiveViews, Wanted
from sgviz.viz.views.models import (
    DashboardView,
    JourneyView,
    KvMapView,
    Numbers,
    Views,
)

__all__ = [
    "NAMES", "DashboardView", "JourneyView", "KvMapView", "LiveViews", "Numbers", "Views", "Wanted", "themes",
]  # fmt: skip
