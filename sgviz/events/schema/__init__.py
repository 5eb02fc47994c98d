"""The whole vocabulary: what can happen in the pipeline, one frozen struct a kind.

An `Event` is a stamped body. `seq` counts per component, `t` is monotonic nanoseconds, `iteration`
is the scheduler's loop number (0 elsewhere). Bodies are encoded as tagged msgpack arrays, so fields
are only ever appended, with a default; `SCHEMA_VERSION` grows when that is not enough.

Imports: standard library and msgspec, nothing else of sgviz. Everybody may import this module.
Slot lists travel as raw little-endian int32 (`bytes`): one copy instead of an object per token.
"""

from __future__ import annotations

from typing import Union, get_args

import msgspec

from sgviz.events.schema.base import (
    Body,
    Reason,
)
from sgviz.events.schema.disaggregation import (
    DisaggBootstrapped,
    DisaggPreallocated,
    DisaggPreallocRefused,
    DisaggQueued,
    DisaggTransferred,
    KvReceived,
    KvSent,
)
from sgviz.events.schema.flow import (
    ForwardsSlowed,
    GenerationContinued,
    GenerationPaused,
    ProfileEnded,
    ProfileStarted,
    WeightsRenamed,
    WeightsUpdated,
)
from sgviz.events.schema.front import (
    ChunkSent,
    OutputReceived,
    RequestAborted,
    RequestConverted,
    RequestDispatched,
    RequestFinished,
    RequestReceived,
    RequestRefused,
    RequestTokenized,
    ResponseFinished,
    TextEmitted,
)
from sgviz.events.schema.memory import (
    PoolReturned,
    PoolTaken,
    RowReturned,
    RowTaken,
    TreeEvicted,
    TreeInserted,
    TreeLocked,
    TreeSplit,
)
from sgviz.events.schema.parallel import DpChose, DpRankChanged, RouterFailed, RouterPaired
from sgviz.events.schema.process import (
    EngineConfigured,
    ProcessStarted,
    TraceCost,
    TraceDropped,
)
from sgviz.events.schema.scheduling import (
    AdmitOk,
    AdmitRefused,
    AdmitRepeated,
    BatchFinished,
    BatchLaunched,
    BatchPlanned,
    BatchProcessed,
    CacheFlushed,
    ChunkCut,
    EmbeddingsPooled,
    GrammarQueued,
    GrammarReady,
    LimitsChanged,
    LoopIdle,
    LoopResumed,
    OutputStreamed,
    PolicyFailed,
    PrefixMatched,
    QueueEntered,
    QueueSorted,
    RequestRetracted,
    ScanStopped,
    TokensSampled,
)
from sgviz.events.schema.session import SessionClosed, SessionOpened, SessionTurn

SCHEMA_VERSION = 1

AnyBody = Union[  # noqa: UP007
    ProcessStarted, EngineConfigured, TraceDropped, TraceCost, RequestReceived, RequestConverted, ChunkSent,
    ResponseFinished, RequestTokenized, RequestDispatched, OutputReceived, RequestFinished,
    RequestRefused, RequestAborted, GrammarQueued, GrammarReady,
    QueueEntered, QueueSorted, PolicyFailed, PrefixMatched, AdmitOk, AdmitRefused,
    AdmitRepeated, ScanStopped, ChunkCut, RequestRetracted, BatchPlanned, BatchLaunched, BatchFinished, TokensSampled,
    EmbeddingsPooled, BatchProcessed, OutputStreamed, LoopResumed, LimitsChanged, LoopIdle, CacheFlushed, RowTaken,
    RowReturned, PoolTaken, PoolReturned, TreeInserted, TreeSplit, TreeEvicted, TreeLocked, TextEmitted,
    GenerationPaused, GenerationContinued, WeightsUpdated, WeightsRenamed, ProfileStarted, ProfileEnded, ForwardsSlowed,
    SessionOpened, SessionClosed, SessionTurn, DpChose, DpRankChanged, RouterPaired, RouterFailed, DisaggQueued,
    DisaggBootstrapped, DisaggPreallocated, DisaggPreallocRefused, KvSent, KvReceived, DisaggTransferred,
]  # fmt: skip


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stamped event. Order two events of a machine by `(t, component, seq)`."""

    seq: int
    t: int
    component: str
    iteration: int
    body: AnyBody

    @property
    def kind(self) -> str:
        """The dotted name, e.g. `batch.planned`."""
        return KIND_OF[type(self.body)]

    @property
    def sort_key(self) -> tuple[int, str, int]:
        return (self.t, self.component, self.seq)


KIND_OF: dict[type, str] = {cls: str(cls.__struct_config__.tag) for cls in get_args(AnyBody)}
BODY_OF: dict[str, type[Body]] = {kind: cls for cls, kind in KIND_OF.items()}

__all__ = [
    "BODY_OF",
    "KIND_OF",
    "SCHEMA_VERSION",
    "AdmitOk",
    "AdmitRefused",
    "AdmitRepeated",
    "AnyBody",
    "BatchFinished",
    "BatchLaunched",
    "BatchPlanned",
    "BatchProcessed",
    "Body",
    "CacheFlushed",
    "ChunkCut",
    "ChunkSent",
    "DisaggBootstrapped",
    "DisaggPreallocRefused",
    "DisaggPreallocated",
    "DisaggQueued",
    "DisaggTransferred",
    "DpChose",
    "DpRankChanged",
    "EmbeddingsPooled",
    "EngineConfigured",
    "Event",
    "ForwardsSlowed",
    "GenerationContinued",
    "GenerationPaused",
    "GrammarQueued",
    "GrammarReady",
    "KvReceived",
    "KvSent",
    "LimitsChanged",
    "LoopIdle",
    "LoopResumed",
    "OutputReceived",
    "OutputStreamed",
    "PolicyFailed",
    "PoolReturned",
    "PoolTaken",
    "PrefixMatched",
    "ProcessStarted",
    "ProfileEnded",
    "ProfileStarted",
    "QueueEntered",
    "QueueSorted",
    "Reason",
    "RequestAborted",
    "RequestConverted",
    "RequestDispatched",
    "RequestFinished",
    "RequestReceived",
    "RequestRefused",
    "RequestRetracted",
    "RequestTokenized",
    "ResponseFinished",
    "RouterFailed",
    "RouterPaired",
    "RowReturned",
    "RowTaken",
    "ScanStopped",
    "SessionClosed",
    "SessionOpened",
    "SessionTurn",
    "TextEmitted",
    "TokensSampled",
    "TraceCost",
    "TraceDropped",
    "TreeEvicted",
    "TreeInserted",
    "TreeLocked",
    "TreeSplit",
    "WeightsRenamed",
    "WeightsUpdated",
]
