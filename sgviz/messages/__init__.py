"""What crosses processes: tagged msgspec structs in msgpack, named as in SGLang.

`GenerateReqInput` stays in the main process; everything else travels. Mirrors SGLang's io_struct.
Imports: errors, events.
"""

from sgviz.messages.control import (
    AbortReq,
    ConfigureTraceReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    ShutdownReq,
)
from sgviz.messages.debug import DebugReq, DebugReqOutput, DebugStatus
from sgviz.messages.embedding import (
    BatchEmbeddingOutput,
    EmbeddingReqInput,
    EmbeddingSpec,
    TokenizedEmbeddingReqInput,
)
from sgviz.messages.flow import FlowQuestion, FlowReply
from sgviz.messages.generate import (
    BatchStrOutput,
    BatchTokenIDOutput,
    FinishReason,
    GenerateReqInput,
    OutputColumns,
    TokenizedGenerateReqInput,
)
from sgviz.messages.parallel import ActiveRanksOutput, RoutedReq
from sgviz.messages.sampling import SamplingParams
from sgviz.messages.session import SessionQuestion, SessionReply

ToScheduler = (
    TokenizedGenerateReqInput
    | TokenizedEmbeddingReqInput
    | AbortReq
    | FlushCacheReqInput
    | GetInternalStateReq
    | ConfigureTraceReq
    | ShutdownReq
    | DebugReq
    | FlowQuestion
    | SessionQuestion
)
ToController = ToScheduler | ActiveRanksOutput
ToDetokenizer = (
    BatchTokenIDOutput
    | BatchEmbeddingOutput
    | GetInternalStateReqOutput
    | ConfigureTraceReq
    | ActiveRanksOutput
    | ShutdownReq
)
ToTokenizer = (
    BatchStrOutput
    | BatchEmbeddingOutput
    | AbortReq
    | FlushCacheReqOutput
    | GetInternalStateReqOutput
    | HealthCheckOutput
    | DebugReqOutput
    | FlowReply
    | SessionReply
    | RoutedReq
)

__all__ = [
    "AbortReq", "ActiveRanksOutput", "BatchEmbeddingOutput", "BatchStrOutput", "BatchTokenIDOutput",
    "ConfigureTraceReq",
    "DebugReq",
    "DebugReqOutput",
    "DebugStatus", "EmbeddingReqInput", "EmbeddingSpec", "FinishReason",
    "FlowQuestion", "FlowReply",
    "FlushCacheReqInput", "FlushCacheReqOutput", "GenerateReqInput", "GetInternalStateReq",
    "GetInternalStateReqOutput", "HealthCheckOutput", "OutputColumns", "RoutedReq", "SamplingParams",
    "SessionQuestion", "SessionReply", "ShutdownReq",
    "ToController", "ToDetokenizer", "ToScheduler", "ToTokenizer", "TokenizedEmbeddingReqInput",
    "TokenizedGenerateReqInput",
]  # fmt: skip
