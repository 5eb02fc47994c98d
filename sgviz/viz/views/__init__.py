"""What the live widgets and the page `/viz` show, as values: one Python code makes them for both, and no picture.

Imports: events, errors, recording, numpy. Neither matplotlib nor anywidget.
"""

from sgviz.viz.views.colours import themes
from sgviz.viz.views.live import MAX_SECONDS, NAMES, LiveViews, Wanted, pause
from sgviz.viz.views.models import (
    DashboardView,
    JourneyView,
    KvMapView,
    Numbers,
    OverlapView,
    Views,
)
from sgviz.viz.views.ranked import RankedViews, check_rank

__all__ = [
    "MAX_SECONDS", "NAMES", "DashboardView", "JourneyView", "KvMapView", "LiveViews", "Numbers", "OverlapView",
    "RankedViews", "Views", "Wanted", "check_rank", "pause", "themes",
]  # fmt: skip
