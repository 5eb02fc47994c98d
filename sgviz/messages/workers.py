"""What the main process and its tokenizer workers say to each other, beside what goes to and from the scheduler.

A worker speaks to the router of the main process as if that were the scheduler. Orders are the router's; those with
an `id` are answered by an `OrderDone` when they are done. Mirrors TokenizerWorkerRegistrationReq and
PauseContinueBroadcastReq of SGLang's io_struct, and adds what else must hold in all workers.
Imports: messages.flow.
"""

from __future__ import annotations

import msgspec

from sgviz.messages.flow import PauseMode


class TokenizerWorkerRegistrationReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """From a worker, first of all: its sockets are connected."""


class WorkerWelcome(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """The answer when all have come: all can be reached, and may open their ports. `events_on`: events are emitted."""

    events_on: bool


class HttpNoted(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """From a worker: an HTTP request came (`status` empty), or its answer left."""

    endpoint: str
    method: str
    status: str = ""


class GivenUp(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """From a worker: the request `rid` that began at `created` has ended here without a word of the engine."""

    rid: str
    created: int


class OrderDone(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """From a worker: what the order `id` asked for is so."""

    id: str


class PauseContinueBroadcastReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Let no new request go on; None: let them. Of mode abort: end all, and done is when none is left."""

    id: str
    mode: PauseMode | None


class HoldForWeightsReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Let no new request go on until the release; done is when none is under way (or all stand still in a pause)."""

    id: str
    abort_all: str = ""  # why all requests end before, if they do


class ReleaseAfterWeightsReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """The end of one hold, whose id is `hold`."""

    id: str
    hold: str


class WeightsNamedReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Which weights answers come from now; `progress`: output tokens by rid that the ones before made.

    `renamed`: only their name is new.
    """

    id: str
    model_path: str
    weight_version: str
    progress: dict[str, int] = {}
    renamed: bool = False


class AbortBroadcastReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """End the request that was called `rid`, wherever it is, or all; with an id, done is when all have ended."""

    id: str = ""
    rid: str = ""
    abort_all: bool = False
    message: str = ""


class ConfigureLoggingReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Change what is given of the request log."""

    on: bool | None = None
    level: int | None = None
    form: str | None = None


class DrainReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Take no new requests, for `message`; done is when those under way have ended, with `grace` seconds for it."""

    id: str
    grace: float
    message: str


class EngineFailedReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """The engine is gone: end every request with 503."""

    message: str


WorkerOrder = (
    WorkerWelcome
    | PauseContinueBroadcastReq
    | HoldForWeightsReq
    | ReleaseAfterWeightsReq
    | WeightsNamedReq
    | AbortBroadcastReq
    | ConfigureLoggingReq
    | DrainReq
    | EngineFailedReq
)
AckedOrder = (
    PauseContinueBroadcastReq
    | HoldForWeightsReq
    | ReleaseAfterWeightsReq
    | WeightsNamedReq
    | AbortBroadcastReq
    | DrainReq
)
WorkerNews = TokenizerWorkerRegistrationReq | HttpNoted | GivenUp | OrderDone
Told = (
    AbortBroadcastReq | ConfigureLoggingReq | PauseContinueBroadcastReq
)  # without waiting: there is no id then
