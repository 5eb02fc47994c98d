"""Control messages that pause, continue, reload, profile and measure a running engine. Each request has one reply.

Names and defaults are those of SGLang's io_struct; one request type stands for starting a profile and one for
ending it. Imports: msgspec only.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

PauseMode = Literal["abort", "retract", "in_place"]
Activity = Literal["CPU", "GPU"]
PAUSE_MODES: tuple[str, ...] = get_args(PauseMode)
LOAD_FORMATS = ("auto", "safetensors")


class PauseGenerationReqInput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Run no more forwards. `retract`: all running requests give up their KV and wait; `in_place`: they keep it.

    Mode `abort` does not come so far: the TokenizerManager ends the requests, and the scheduler goes on.
    """

    id: str
    mode: PauseMode


class ContinueGenerationReqInput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Run forwards again; harmless if they run."""

    id: str


class UpdateWeightFromDiskReqInput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Take the weights of the model at `model_path` instead of the present ones, and drop what was cached of those.

    `ranks`: of several data parallel ranks those that are meant; None: all.
    """

    id: str
    model_path: str
    weight_version: str
    flush_cache: bool = True
    ranks: tuple[int, ...] | None = None


class StartProfileReqInput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Let torch's profiler watch the scheduler's process, for `num_steps` forwards or until it is told to stop."""

    id: str
    output_dir: str | None = None
    num_steps: int | None = None
    activities: tuple[Activity, ...] | None = None
    with_stack: bool = False
    record_shapes: bool = False
    profile_id: str | None = None


class StopProfileReqInput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    id: str


class SlowDownReqInput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Sleep so many seconds before each forward; None: no more."""

    id: str
    forward_sleep_time: float | None = None


class GetLoadsReqInput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    id: str


class ControlReqOutput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """The answer to every one of these but the last: done, or why not, with an HTTP status and the field at fault."""

    id: str
    success: bool
    message: str
    status: int = 400
    param: str | None = None
    dp_rank: int = 0


class PauseGenerationReqOutput(ControlReqOutput, kw_only=True, tag=True, array_like=True):
    """Sent when nothing runs any more. `requests`: how many are held."""

    requests: int = 0


class UpdateWeightFromDiskReqOutput(ControlReqOutput, kw_only=True, tag=True, array_like=True):
    """`progress`: output tokens of each live request (by rid) that came from the weights before."""

    progress: dict[str, int] = {}


class ProfileReqOutput(ControlReqOutput, kw_only=True, tag=True, array_like=True):
    """`path`: the trace file, written when the profile ends."""

    path: str = ""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a scheduler is.

    Attributes:
        num_waiting_reqs: in its queue or waiting for a grammar.
        num_used_tokens: KV tokens that requests hold. num_total_tokens: with what the waiting ones will need at least.
        gen_throughput: output tokens a second, over the last seconds in which somebody asked (else since the start).
        cache_hit_rate: share of prompt tokens found in the cache, of first prefills.
        utilization: running requests of those that may run.
        paused: requests held by a pause. retracted: those among the waiting that gave up their KV.
        weight_bytes, kv_bytes: on the device.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    num_total_tokens: int = 0
    max_total_num_tokens: int = 0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    max_running_requests: int = 0
    grammar: int = 0
    paused: int = 0
    retracted: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0

    @property
    def token_usage(self) -> float:
        return self.num_used_tokens / max(self.max_total_num_tokens, 1)

    @property
    def utilization(self) -> float:
        return self.num_running_reqs / max(self.max_running_requests, 1)


class GetLoadsReqOutput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    id: str
    load: Load
    dp_rank: int = 0


FlowQuestion = (
    PauseGenerationReqInput
    | ContinueGenerationReqInput
    | UpdateWeightFromDiskReqInput
    | StartProfileReqInput
    | StopProfileReqInput
    | SlowDownReqInput
    | GetLoadsReqInput
)
FlowReply = (
    ControlReqOutput
    | PauseGenerationReqOutput
    | UpdateWeightFromDiskReqOutput
    | ProfileReqOutput
    | GetLoadsReqOutput
)
