"""What a server that is one side of a prefill/decode pair starts beside its schedulers, and each of them for itself.

Mirrors SGLang's start of the bootstrap server, which there the first scheduler of the TokenizerManager's host does.
Imports: config, disaggregation, worker protocol, events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
import zmq

from sgviz.config import Settings
from sgviz.disaggregation.protocol import KVManager
from sgviz.disaggregation.wire import FAKE_BOOTSTRAP_HOST
from sgviz.errors import ConfigError
from sgviz.events import Tracer
from sgviz.messages import GenerateReqInput
from sgviz.worker.protocol import MovesKV, Worker


def bootstrap_host(settings: Settings) -> str:
    """Where a prefill server's ranks are told."""
    return settings.disaggregation.disaggregation_bootstrap_host or settings.serve.host


def start_bootstrap(settings: Settings) -> tuple[Settings, Callable[[], None]]:
    """The bootstrap server of a prefill server: the settings with its real port, and what ends it.

    Raises:
        StartupError: its address cannot be used.
    """
    own = settings.disaggregation
    if own.disaggregation_mode != "prefill":
        return settings, lambda: None
    from sgviz.disaggregation.bootstrap_server import BootstrapServer  # FastAPI comes with it

    server = BootstrapServer(bootstrap_host(settings), own.disaggregation_bootstrap_port)
    own = msgspec.structs.replace(own, disaggregation_bootstrap_port=server.port)
    return msgspec.structs.replace(settings, disaggregation=own), server.close


def open_kv(
    settings: Settings, worker: Worker, context: zmq.Context[Any], trace: Tracer, dp_rank: int
) -> KVManager | None:
    """What moves the KV of a scheduler; None where nothing moves. The scheduler closes it.

    Raises:
        ConfigError: the model has no KV that could move. StartupError: an address cannot be used.
    """
    mode = settings.disaggregation.disaggregation_mode
    if mode == "null":
        return None
    if not worker.info.is_generation:
        raise ConfigError(
            f"disaggregation_mode {mode}: {worker.info.model} is an encoder, which generates nothing and has no KV to "
            "send; serve it with disaggregation_mode null",
            param="disaggregation_mode",
        )
    if not hasattr(worker, "read_kv"):
        raise ConfigError(
            f"disaggregation_mode {mode}: the KV of device {settings.model.device} cannot travel",
            param="disaggregation_mode",
        )
    from sgviz.disaggregation.factory import make_kv_manager

    address = (bootstrap_host(settings), settings.disaggregation.disaggregation_bootstrap_port)
    return make_kv_manager(
        settings, cast(MovesKV, worker), context, trace.clock, trace, dp_rank=dp_rank,
        bootstrap=address if mode == "prefill" else None,
    )  # fmt: skip


def without_other_side(request: GenerateReqInput, room: int) -> GenerateReqInput:
    """The same request for one side of a pair alone: nothing travels."""
    request.bootstrap_host, request.bootstrap_room = FAKE_BOOTSTRAP_HOST, room
    return request
