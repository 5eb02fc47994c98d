"""Layer 0: events, the tracer that emits them, clocks, and the fold of one request's time.

Imports: the standard library and msgspec. Both wings (the engine that emits, the readers that fold)
stand on this folder and on nothing else in common.
"""

from sgviz.events.clock import Clock, HostClock, OtherHostClock, VirtualClock, WallClock
from sgviz.events.ring import RingSink
from sgviz.events.schema import SCHEMA_VERSION, Event, Reason
from sgviz.events.time_stats import Stage, TimeStats, end_to_end_ns, stages
from sgviz.events.tracer import BufferSink, NullSink, Sink, Tracer

__all__ = [
    "SCHEMA_VERSION", "BufferSink", "Clock", "Event", "HostClock", "NullSink", "OtherHostClock", "Reason", "RingSink",
    "Sink", "Stage", "TimeStats", "Tracer", "VirtualClock", "WallClock", "end_to_end_ns", "stages",
]  # fmt: skip
