"""The reading wing's first part: from events to facts. Opens a recording without torch and without an engine.

Imports: events, errors, msgspec, pandas.
"""

from sgviz.recording.fold import BatchState, Difference, Folded, KvRow, State, fold
from sgviz.recording.journey import TypeStep
from sgviz.recording.ledger import Ledger
from sgviz.recording.recording import Recording, load
from sgviz.recording.requests import Phase, PhaseName, RequestState
from sgviz.recording.sink import FileSink
from sgviz.recording.store import ClockAnchor, Header, UnknownEvent

__all__ = [
    "BatchState", "ClockAnchor", "Difference", "FileSink", "Folded", "Header", "KvRow", "Ledger", "Phase",
    "PhaseName", "Recording", "RequestState", "State", "TypeStep", "UnknownEvent", "fold", "load",
]  # fmt: skip
