"""Bridge: what a served engine lets others see of it: /metrics, /sgviz/events, /sgviz/state, /viz.

Everything is folded from the events in the process of the API; the scheduler is never asked.
Imports: recording, viz.views, serving (access levels), events.
"""

from sgviz.observe.live import ViewDesk, live_mount
from sgviz.observe.routes import observe_mount

__all__ = ["ViewDesk", "live_mount", "observe_mount"]
