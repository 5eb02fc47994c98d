"""make_kv_manager: from settings to the manager of this scheduler's side.

Imports: config, events, worker protocol, disaggregation (no torch).
"""

from __future__ import annotations

from typing import Any

import zmq

from sgviz.config import Settings
from sgviz.disaggregation.decode import DecodeManager
from sgviz.disaggregation.prefill import PrefillManager
from sgviz.events import Tracer
from sgviz.events.clock import Clock
from sgviz.worker.protocol import MovesKV


def make_kv_manager(
    settings: Settings,
    worker: MovesKV,
    context: zmq.Context[Any],
    clock: Clock,
    trace: Tracer,
    *,
    dp_rank: int = 0,
    bootstrap: tuple[str, int] | None = None,
) -> PrefillManager | DecodeManager | None:
    """The manager for `settings.disaggregation.disaggregation_mode`; None in mode null.

    Args:
        worker: whose KV travels. context: where its sockets are opened; `close` closes them.
        clock: for time limits and signs of life; that of the tracer.
        dp_rank: of this scheduler.
        bootstrap: host and port of the prefill server's own BootstrapServer, started before; for mode prefill.

    Raises:
        StartupError: the KV channel's address cannot be opened, or the bootstrap server is not there.
    """
    mode = settings.disaggregation.disaggregation_mode
    if mode == "prefill":
        return PrefillManager(settings, worker, context, clock, trace, dp_rank=dp_rank, bootstrap=bootstrap)
    if mode == "decode":
        return DecodeManager(settings, worker, context, clock, trace)
    return None
