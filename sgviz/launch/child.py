"""Entry of a child process: `python -m sgviz.launch.child FD`. Not for people; the parent speaks first.

The boot message comes on standard input, which then stays open as a lifeline: when it closes, the parent
is gone and the child leaves at once. `FD` is the writing end of a one-way pipe to the parent: first it
says ready (or why not), and once more, if the component dies later, why.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from io import RawIOBase
from typing import Any

import msgspec
import setproctitle
import zmq

from sgviz.errors import StartupError
from sgviz.launch.messages import (
    SWITCH_INTERVAL_S,
    BootMessage,
    Died,
    ExitCode,
    FailedStart,
    InitInfo,
    Ready,
    frame,
    read_frame,
)

log = logging.getLogger("sgviz")
LONGEST_WHY = 4000  # nobody reads the pipe before the process has ended, so it must fit in


def main(report_fd: int) -> int:
    """Run the component named in the boot message; returns the exit code."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    lifeline = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115 (open as long as we live)
    try:
        boot = msgspec.msgpack.decode(read_frame(lifeline), type=BootMessage)
    except StartupError:  # the parent was interrupted before it could speak
        return ExitCode.PARENT_GONE
    threading.Thread(target=_die_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    setproctitle.setproctitle(f"sgviz::{boot.component}")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _configure_logging(boot)
    report = Report(boot.component, report_fd)
    try:
        _run(boot, report)
    except BaseException as error:
        report.failed(error)
        return ExitCode.FAILED
    return ExitCode.ORDERLY


class Report:
    """What the parent is told through the pipe."""

    def __init__(self, component: str, fd: int) -> None:
        self._component = component
        self._fd = fd
        self._ready = False

    def ready(self, info: InitInfo) -> None:
        self._send(Ready(info=info))
        self._ready = True

    def failed(self, error: BaseException) -> None:
        """The component raised: while starting the parent shows it, later it goes into the log as well."""
        text = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {error}"
        if not self._ready:
            self._send(FailedStart(component=self._component, message=message, traceback=text))
            return
        log.critical("%s died:\n%s", self._component, text)
        self._send(Died(why=message[:LONGEST_WHY]))

    def stuck(self, why: str) -> None:
        """Say where every thread is, then end the process without asking any of them."""
        from sgviz.launch.watchdog import stacks

        log.critical("%s gives up: %s\n%s", self._component, why, stacks())
        self._send(Died(why=why))
        os._exit(ExitCode.STUCK)

    def _send(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(OSError):  # the parent is gone; the lifeline ends us
            os.write(self._fd, frame(message))


def _run(boot: BootMessage, report: Report) -> None:
    from sgviz.events import OtherHostClock, WallClock
    from sgviz.launch.components import Context, run_component

    context: zmq.Context[Any] = zmq.Context()
    component = Context(
        settings=boot.settings,
        ports=boot.ports,
        zmq=context,
        tokenizer_dir=boot.tokenizer_dir,
        mode="processes",
        give_up=report.stuck,
        worker=boot.worker,
        clock=OtherHostClock(boot.clock_shift_ns) if boot.clock_shift_ns else WallClock(),
    )
    try:
        if boot.worker is None:
            run_component(boot.component, component, report.ready)
        else:
            from sgviz.launch.tokenizer_worker import run_tokenizer_worker  # it brings the HTTP server along

            run_tokenizer_worker(component, report.ready)
    finally:
        context.destroy(linger=500)


def _die_with_parent(lifeline: RawIOBase) -> None:
    while lifeline.read(4096):
        pass
    os._exit(ExitCode.PARENT_GONE)


def _configure_logging(boot: BootMessage) -> None:
    logging.basicConfig(
        level=boot.settings.serve.log_level.upper(),
        format=f"[%(asctime)s {boot.component}] %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
