"""The reading wing's first part: from events to facts. Opens a recording without torch and without an engine.

Imports: events, errors, msgspec, pandas.
"""

from sgviz.recording.engine_fold import Difference, EngineFold
from sgviz.recording.explanation import Cause, Explanation, Part
from sgviz.recording.fold import BatchState, Folded, KvRow, State, fold
from sgviz.recording.journey import TypeStep
from sgviz.recording.ledger import Ledger
from sgviz.recording.moment import Moment, TreeNodeState
from sgviz.recording.recording import Recording, load
from sgviz.recording.requests import Phase, PhaseName, RequestState
from sgviz.recording.sink import FileSink
from sgviz.recording.store import ClockAnchor, Header, UnknownEvent

__all__ = [
    "BatchState", "Cause", "ClockAnchor", "Difference", "EngineFold", "Explanation", "FileSink", "Folded",
    "Header", "KvRow", "Ledger", "Moment", "Part", "Phase", "TreeNodeState",
    "PhaseName", "Recording", "RequestState", "State", "TypeStep", "UnknownEvent", "fold", "load",
]  # fmt: skip
