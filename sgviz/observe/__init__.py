"""Bridge: what a served engine lets others see of it: /metrics, /sgviz/events, /sgviz/state.

Everything is folded from the events in the process of the API; the scheduler is never asked.
Imports: recording, serving (access levels), events.
"""

from sgviz.observe.routes import observe_mount

__all__ = ["observe_mount"]
