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
from sgviz.messages.generate import (
    BatchStrOutput,
    BatchTokenIDOutput,
    FinishReason,
    GenerateReqInput,
    OutputColumns,
    TokenizedGenerateReqInput,
)
from sgviz.messages.sampling import SamplingParams

ToScheduler = (
    TokenizedGenerateReqInput
    | AbortReq
    | FlushCacheReqInput
    | GetInternalStateReq
    | ConfigureTraceReq
    | ShutdownReq
    | DebugReq
)
ToDetokenizer = BatchTokenIDOutput | GetInternalStateReqOutput | ConfigureTraceReq | ShutdownReq
ToTokenizer = (
    BatchStrOutput
    | AbortReq
    | FlushCacheReqOutput
    | GetInternalStateReqOutput
    | HealthCheckOutput
    | DebugReqOutput
)

__all__ = [
    "AbortReq", "BatchStrOutput", "BatchTokenIDOutput", "ConfigureTraceReq", "DebugReq", "DebugReqOutput",
    "DebugStatus", "FinishReason",
    "FlushCacheReqInput", "FlushCacheReqOutput", "GenerateReqInput", "GetInternalStateReq",
    "GetInternalStateReqOutput", "HealthCheckOutput", "OutputColumns", "SamplingParams", "ShutdownReq",
    "ToDetokenizer", "ToScheduler", "ToTokenizer", "TokenizedGenerateReqInput",
]  # fmt: skip
