"""The reading wing's first part: from events to facts. Opens a recording without torch and without an engine.

Imports: events, errors, msgspec, pandas.
"""

from sgviz.recording.audit import AuditReport
from sgviz.recording.books import Finding
from sgviz.recording.diff import Diff, FirstDifference
from sgviz.recording.engine_fold import Difference, EngineFold
from sgviz.recording.explanation import Cause, Explanation, Part
from sgviz.recording.fold import BatchState, Folded, KvRow, State, fold
from sgviz.recording.journey import TypeStep
from sgviz.recording.ledger import Ledger
from sgviz.recording.moment import Moment, TreeNodeState
from sgviz.recording.pair_clock import ClockFit
from sgviz.recording.pairing import PairAudit, PairedRecording, load_pair
from sgviz.recording.recording import Recording, load
from sgviz.recording.requests import Phase, PhaseName, RequestState
from sgviz.recording.sink import FileSink
from sgviz.recording.store import ClockAnchor, Header, UnknownEvent

__all__ = [
    "AuditReport",
    "BatchState",
    "Cause",
    "ClockAnchor",
    "ClockFit",
    "Diff",
    "Difference",
    "EngineFold",
    "Explanation",
    "FileSink",
    "Finding",
    "FirstDifference",
    "Folded",
    "Header",
    "KvRow",
    "Ledger",
    "Moment",
    "PairAudit",
    "PairedRecording",
    "Part",
    "Phase",
    "PhaseName",
    "Recording",
    "RequestState",
    "State",
    "TreeNodeState",
    "TypeStep",
    "UnknownEvent",
    "fold",
    "load",
    "load_pair",
]  # fmt: skip
