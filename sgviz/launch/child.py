"""Entry of a child process: `python -m sgviz.launch.child FD`. Not for people; the parent speaks first.

The boot message comes on standard input, which then stays open as a lifeline: when it closes, the parent
is gone and the child leaves at once. `FD` is the writing end of the one-way ready pipe.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from io import RawIOBase
from typing import BinaryIO

import msgspec
import setproctitle
import zmq

from sgviz.launch.messages import BootMessage, FailedStart, InitInfo, Ready, frame, read_frame

PARENT_GONE = 3


def main(ready_fd: int) -> int:
    """Run the component named in the boot message; returns the exit code."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    lifeline = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115 (open as long as we live)
    boot = msgspec.msgpack.decode(read_frame(lifeline), type=BootMessage)
    threading.Thread(target=_die_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    setproctitle.setproctitle(f"sgviz::{boot.component}")
    _configure_logging(boot)
    ready = os.fdopen(ready_fd, "wb")
    try:
        _run(boot, ready)
    except BaseException as error:
        _report(boot, ready, error)
        return 1
    return 0


def _run(boot: BootMessage, ready: BinaryIO) -> None:
    from sgviz.launch.components import COMPONENTS, Context

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def tell(info: InitInfo) -> None:
        ready.write(frame(Ready(info=info)))
        ready.close()

    component = Context(
        settings=boot.settings,
        ports=boot.ports,
        zmq=context,
        tokenizer_dir=boot.tokenizer_dir,
        mode="processes",
    )
    try:
        COMPONENTS[boot.component](component, tell)
    finally:
        context.destroy(linger=500)


def _report(boot: BootMessage, ready: BinaryIO, error: BaseException) -> None:
    """Before ready the parent is told through the pipe; afterwards the log is all there is."""
    text = "".join(traceback.format_exception(error))
    if ready.closed:
        logging.getLogger("sgviz").critical("%s died:\n%s", boot.component, text)
        return
    message = f"{type(error).__name__}: {error}"
    ready.write(frame(FailedStart(component=boot.component, message=message, traceback=text)))
    ready.close()


def _die_with_parent(lifeline: RawIOBase) -> None:
    while lifeline.read(4096):
        pass
    os._exit(PARENT_GONE)


def _configure_logging(boot: BootMessage) -> None:
    logging.basicConfig(
        level=boot.settings.serve.log_level.upper(),
        format=f"[%(asctime)s {boot.component}] %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
