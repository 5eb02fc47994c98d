"""`sgviz serve`: an OpenAI-compatible server until a signal or the death of a component.

SIGTERM, SIGHUP and Ctrl-C let running requests finish (`--shutdown-grace`), refuse new ones and exit 0; a second
signal ends at once. A component that dies, or that had to be killed at the stop, makes the exit code 1.
Imports: engine, launch (node).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from sgviz.cli.logs import configure_logging
from sgviz.cli.options import Parser, add_config, add_options, settings_from
from sgviz.config import Settings
from sgviz.engine import Engine
from sgviz.launch.node import Node
from sgviz.serving.server import check_address, check_tls

log = logging.getLogger(__name__)

WAIT_S = 0.2
DIED = 1
LAST_WORK_S = 1.0


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="sgviz serve", description="An OpenAI-compatible server. Flags are SGLang's where it has one."
    )
    add_config(parser)
    add_options(parser)
    settings = settings_from(parser.parse_args(argv))
    configure_logging(settings.serve.log_level)
    started = time.monotonic()
    print(f"sgviz serve: loading {settings.model.model_path} ...", file=sys.stderr, flush=True)
    signals = Signals()
    check_address(settings.serve.host, settings.serve.port)
    check_tls(settings.http)
    if settings.parallel.node_rank:
        return _serve_node(settings, signals, started)
    engine = Engine.from_settings(settings, mode="processes", by_workers=True)
    try:
        server = engine.serve()
        _say_ready(engine, server.url, time.monotonic() - started)
        signals.set_ready()
        while not signals.asked.is_set() and not engine.pipeline.dead.is_set():
            signals.asked.wait(WAIT_S)
    except BaseException:
        engine.close(0.0)
        raise
    died = engine.pipeline.dead.is_set()
    log.info("stopping" if not died else "stopping: %s", *([engine.pipeline.status.message] if died else []))
    engine.close()
    return _left(DIED if died or engine.pipeline.forced else 0)


def _serve_node(settings: Settings, signals: Signals, started: float) -> int:
    """A node after the first: schedulers, and a health stub in place of the server."""
    node, own = Node(settings), settings.parallel
    ranks = ", ".join(map(str, own.ranks_of(own.node_rank)))
    print(
        f"sgviz node {own.node_rank} of {own.nnodes} is ready: data parallel ranks {ranks} for node 0 at "
        f"{own.dist_init_addr}; {node.url}/health, after {time.monotonic() - started:.1f} s",
        flush=True,
    )
    try:
        signals.set_ready()
        while not signals.asked.is_set() and not node.ended.is_set():
            signals.asked.wait(WAIT_S)
    finally:
        log.info("stopping" if node.why is None else "stopping: %s", *([node.why] if node.why else []))
        node.close()
    return DIED if node.why is not None or node.forced else 0


def _left(code: int) -> int:
    """The exit code; the program ends here if a thread (a long prompt at the tokenizer) would hold up its end."""
    deadline = time.monotonic() + LAST_WORK_S
    others = [
        each for each in threading.enumerate() if not each.daemon and each is not threading.current_thread()
    ]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    if not any(thread.is_alive() for thread in others):
        return code
    log.warning("ending with work under way in %s", ", ".join(t.name for t in others if t.is_alive()))
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _say_ready(engine: Engine, url: str, seconds: float) -> None:
    info = engine.pipeline.scheduler_info
    keys = " (API key needed)" if engine.settings.serve.api_key else ""
    print(
        f"sgviz is ready: {url}/v1{keys}  model {engine.settings.served_model_name} ({info.dtype}, {info.device}), "
        f"KV {info.max_total_num_tokens} tokens, up to {info.max_running_requests} running, after {seconds:.1f} s",
        flush=True,
    )


class Signals:
    """Before ready a signal interrupts the start; afterwards the first asks for a stop, the second insists."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._ready = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def set_ready(self) -> None:
        self._ready = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._ready:
            raise KeyboardInterrupt
        if self.asked.is_set():
            print("sgviz serve: stopping at once", file=sys.stderr)
            raise KeyboardInterrupt
        self.asked.set()
